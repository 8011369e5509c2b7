"""Which tests run against a planted fault: those of its file, then those of its folder."""

from __future__ import annotations

# Folder -> the tests near it, the nearest first.
NEAR: dict[str, tuple[str, ...]] = {
    "emit/runtime": (
        "single/test_runtime_redistribution.py", "single/test_runtime_parameters.py",
        "single/test_runtime_operators.py", "single/test_variant_runtime.py", "single/test_production_randomness.py",
        "single/test_halo.py", "single/test_losses.py", "single/test_experts.py", "single/test_drawing.py",
        "single/test_overlap.py", "single/test_gradients.py", "single/test_cells.py", "single/test_bags.py",
        "single/test_redistribution_bytes.py", "single/test_initialisation.py", "single/test_recompute.py",
        "single/test_micro_batches.py", "single/test_train_alone.py",
        "single/test_emit_package.py", "single/test_verify_models.py", "single/test_rules_proof.py",
    ),
    "emit/package": ("single/test_emit_package.py", "single/test_train_alone.py", "multi/test_emit_train.py"),
    "emit/markers": ("single/test_marker_check.py", "tiny/test_emit.py"),
    "emit": (
        "single/test_marker_check.py", "tiny/test_emit.py", "tiny/test_emit.py",
        "single/test_emitted_calls.py", "single/test_emit_operators.py", "single/test_emit_package.py",
        "single/test_hostile_names.py", "single/test_recompute.py", "single/test_verify_models.py",
        "multi/test_pipeline.py",
    ),
    "program": (
        "tiny/test_lower.py", "tiny/test_modules.py", "tiny/test_emit.py", "tiny/test_schedule.py",
        "tiny/test_simulate.py", "tiny/test_program_check.py", "tiny/test_again.py", "single/test_overlap.py",
        "single/test_no_all_to_all.py", "single/test_stage_programs.py", "single/test_recompute.py",
        "single/test_verify_models.py",
    ),
    "costs": (
        "tiny/test_op_costs.py", "tiny/test_collective_costs.py", "tiny/test_cost_validation.py", "tiny/test_bands.py",
        "tiny/test_redistribution_paths.py", "tiny/test_reserved_memory.py", "tiny/test_simulate.py",
        "tiny/test_host_tables.py", "tiny/test_estimate_fsdp.py", "tiny/test_estimate.py",
        "tiny/test_estimate_experts.py", "tiny/test_compiled.py", "tiny/test_report.py",
        "single/test_redistribution_bytes.py", "single/test_working_bytes.py", "single/test_rotation_traffic.py",
        "single/test_program_step.py",
    ),
    "rules/algebra": (
        "tiny/test_rules_notation.py", "tiny/test_rules_nesting.py", "tiny/test_rules_candidates.py",
        "tiny/test_rules_gallery.py", "tiny/test_operator_records.py", "tiny/test_graph_strides.py",
        "tiny/test_op_costs.py", "single/test_mutations.py", "single/test_rules_proof.py", "single/test_halo.py",
        "single/test_float8.py", "single/test_operator_strategies.py", "tiny/test_lower.py",
    ),
    "rules/operators": (
        "tiny/test_operator_records.py", "tiny/test_rules_gallery.py", "tiny/test_rules_candidates.py",
        "tiny/test_op_costs.py", "tiny/test_graph_strides.py", "single/test_rules_proof.py",
        "single/test_emit_operators.py", "single/test_emitted_calls.py", "single/test_kept_tensors.py",
        "single/test_doc_pages.py", "single/test_rebatch.py", "single/test_propagation_cases.py",
    ),
    "rules": (
        "tiny/test_rules_candidates.py", "tiny/test_rules_gallery.py", "tiny/test_operator_records.py",
        "tiny/test_host_tables.py", "single/test_rules_proof.py", "single/test_captured_batch.py",
        "single/test_sequence_lengths.py", "single/test_free_sizes.py", "single/test_rebatch.py",
        "single/test_capture_values.py", "single/test_operator_strategies.py", "single/test_propagation_cases.py",
    ),
}  # fmt: skip
BEFORE = {  # of one file, before those of its folder
    "emit/runtime/pipeline.py": ("multi/test_pipeline.py",),
    "emit/runtime/weights.py": ("single/test_zero_levels.py",),
    "emit/runtime/flat_weights.py": ("single/test_zero_levels.py",),
    "emit/package/batches.py": ("single/test_loader_state.py",),
    "emit/package/run_options.py": ("single/test_train_mistakes.py",),
    "emit/package/train.py": ("single/test_zero_levels.py", "single/test_micro_batches.py", "multi/test_pipeline.py"),
    "emit/readme_use.py": ("multi/test_called_package.py",),
    "rules/value_range.py": ("single/test_capture_values.py",),
    "rules/resize/rebatch.py": ("single/test_rebatch.py",),
    "rules/resize/captured_batch.py": ("single/test_captured_batch.py",),
    "rules/resize/captured_length.py": ("single/test_sequence_lengths.py",),
    "rules/resize/asked_sizes.py": ("single/test_free_sizes.py",),
    "rules/algebra/halo_exchange.py": ("single/test_halo.py",),
    "rules/algebra/view_strides.py": ("tiny/test_graph_strides.py",),
    "costs/expert_layers.py": ("tiny/test_estimate_experts.py",),
    "costs/links.py": ("tiny/test_collective_costs.py", "tiny/test_redistribution_paths.py"),
    "program/gradient_buckets.py": ("tiny/test_fusion.py",),
    "program/step_check.py": ("tiny/test_step_plan.py",),
}
BY_PROCESSES = ("multi/test_runtime_gloo.py", "multi/test_emit_train.py")  # parameters are DTensors there alone
