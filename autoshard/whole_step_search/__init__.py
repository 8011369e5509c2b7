"""Searches whole steps: stages, schedule, micro-batch, recompute, ZeRO and the mesh inside a stage together."""
