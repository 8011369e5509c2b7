"""Verification must be able to fail: a fault planted in the emitted text is found, and the tensor is named."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from autoshard.cli import commands
from autoshard.cluster.hardware import load_hardware
from autoshard.emit import emit
from autoshard.graph_capture.capture import capture
from autoshard.ir.mesh import Mesh
from autoshard.ir.program import Program
from autoshard.program.lower import lower
from autoshard.replay.resize import reapply
from autoshard.search.search_request import SearchRequest
from autoshard.search.select_plan import search
from autoshard.verification import Case, Proof, check_files, make_case
from tests.slow import thinned

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT2 = f"{EXAMPLES / 'gpt2.py'}:build"
SMALL = {"n_layer": 1, "sequence": 8, "n_embd": 48, "vocabulary": 97}
MLP = {"batch": 16, "features": 12, "hidden": 20, "outputs": 4}


@cache
def megatron_gpt2() -> tuple[Case, Program, dict[str, str]]:
    """One layer of GPT-2 in Megatron's style on dp=2, tp=2, as planned at full size."""
    hardware, mesh = load_hardware("a100-80g-sxm"), Mesh.parse("dp=2,tp=2")
    full, small = capture(GPT2, {"n_layer": 1}), capture(GPT2, SMALL)
    plan = reapply(search(full, hardware, SearchRequest(mesh, strategy="megatron")), full, small, hardware)
    program = lower(plan, small)
    return make_case(GPT2, SMALL, small), program, dict(emit(program, plan, small))


def edited(text: str, pattern: str, replacement: str) -> str:
    """The text with the first match of `pattern` replaced."""
    text, count = re.subn(pattern, replacement, text, count=1)
    assert count == 1, f"the emitted text has no {pattern!r} any more"
    return text


def with_fault(name: str, pattern: str, replacement: str) -> Proof:
    case, program, files = megatron_gpt2()
    return check_files(case, program, files | {name: edited(files[name], pattern, replacement)})


def test_without_a_fault_it_passes() -> None:
    case, program, files = megatron_gpt2()
    proof = check_files(case, program, files)
    assert proof.passed, proof.failure
    assert (proof.ranks, proof.steps, proof.clipped_steps) == (4, 3, 2)
    assert {kind.kind: kind.count > 0 for kind in proof.kinds} == {
        "output": True, "gradient": True, "parameter": True, "buffer": False, "precision": False,
        "evaluation": True,
    }  # fmt: skip


MODEL, LOSS = "model_parallel.py", "output loss on rank"
FAULTS = {
    "bias added on every rank": (
        MODEL, r"bias = mask\(local\(self.c_proj.bias\), self.tp\)", "bias = local(self.c_proj.bias)", LOSS
    ),
    "a gradient left out of its bucket": (
        MODEL, r'"transformer.ln_f.bias", ', "", "gradient transformer.ln_f.bias"
    ),
    "a sum of gradients missing in backward": (
        MODEL, r"column_parallel\((hidden_states), self.tp, (local\(self.c_fc)", r"F.linear(\1, \2", "gradient "
    ),
    "query, key and value permuted": (MODEL, "query_states, key_states,", "key_states, query_states,", LOSS),
    "dropout masks by local index": (
        MODEL, r'shape=\(2 \* batch, 12, (.*)\),\s*layout="S0 S1"', r'shape=(batch, 6, \1), layout="R R"', LOSS
    ),
    "dropout operators numbered wrongly": (MODEL, r"index=self.first_random \+ 1", "index=self.first_random", LOSS),
    "a mean of means over ignored labels": (MODEL, r"rows=\(self.dp,\)", "rows=()", LOSS),
    "gradients pile up": ("train.py", r"optimizer.zero_grad\(.*\)", "pass", "in step 2"),
    "a norm that is off": ("runtime/gradients.py", r"(norm = .*\.sqrt\(\))", r"\1 / 2", "global norm"),
    "a clip factor above 1": ("runtime/gradients.py", r"\.clamp\(max=1.0\)", "", "in step 2"),
    "nothing is clipped": ("runtime/gradients.py", r"torch._foreach_mul_\(.*\)", "pass", "in step 1"),
    "a bucket left out": ("runtime/gradients.py", r"in buckets\]", "in buckets[1:]]", "gradient "),
    "a bucket reduced twice": (
        "runtime/gradients.py", r"( +)(self.wait:.*= )(.*)", r"\1\3()\n\1\2\3", "gradient "
    ),
    "a bucket that does not wait for its last gradient": (
        "runtime/gradients.py", r"return len\(self.taken\) == .*", "return bool(self.taken)", "gradient "
    ),
    "a reduction not waited for": ("runtime/gradients.py", r"\n        self.wait\(\)", "", "NaN"),
    "ranks that reduce over different axes": (
        "runtime/gradients.py", r"_Bucket\(mesh.joint\(axes\)",
        "_Bucket(mesh.joint(axes if mesh.rank else tuple(mesh.axes))", "waited in vain"
    ),
    "the mesh numbers its ranks wrongly": (
        "runtime/mesh.py", r"in reversed\(self.axes.items\(\)\)", "in self.axes.items()", "verification failed"
    ),
    "the package's masks are others": ("runtime/randomness.py", r">= int\(p \*", "< int(p *", LOSS),
    "a crash on one rank": (
        MODEL, "(query_states, key_states, value)", r"assert self.tp.index == 0, 'planted'\n        \1", "planted"
    ),
    "a file that does not parse": (MODEL, r"class GPT2\(", "class GPT2[", "SyntaxError"),
}  # fmt: skip


@pytest.mark.parametrize("fault", thinned(FAULTS, 2))
def test_a_planted_fault_is_found(fault: str) -> None:
    *edit, named = FAULTS[fault]
    proof = with_fault(*edit)
    assert not proof.passed
    assert named in proof.failure


def plan_mlp(folder: Path) -> None:
    words = [f"{name}={value}" for name, value in MLP.items()]
    model = f"{EXAMPLES / 'mlp.py'}:build"
    command = ["plan", model, "--mesh", "dp=2", "--hardware", "cpu-local", "--strategy", "megatron"]
    assert commands.main([*command, "--out", str(folder), "--with", *words]) == 0


def test_the_command_runs_the_edited_file_and_exits_with_6(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mlp"
    plan_mlp(out)
    assert commands.main(["verify", str(out)]) == 0
    assert "verified on dp=2: 2 gloo processes" in capsys.readouterr().out

    model = out / "model_parallel.py"
    model.write_text(edited(model.read_text(), r"x = F.relu\(", "x = 1.00001 * F.relu("))
    assert commands.main(["verify", str(out), "--full"]) == 6
    printed = capsys.readouterr()
    assert "NOT verified" in printed.out and "output loss on rank 0 in step 1: relative error" in printed.err


def test_a_file_of_the_package_that_ends_the_program_is_named() -> None:
    case, program, files = megatron_gpt2()
    proof = check_files(case, program, files | {MODEL: files[MODEL] + "raise SystemExit(3)\n"})
    assert re.search(r"model_parallel.py:\d+ `raise SystemExit\(3\)`: it ended the program", str(proof.failure))


def test_an_edited_file_must_run_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mlp"
    plan_mlp(out)
    (out / "train.py").write_text((out / "train.py").read_text() + "\n# mine\n")
    assert commands.main(["verify", str(out), "--backend", "lockstep", "--verify-with", "batch=8"]) == 6
    printed = capsys.readouterr()
    assert f"{out / 'train.py'} is not what its plan.json says: it was edited" in printed.err
    assert "--full" in printed.err
