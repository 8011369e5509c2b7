"""Whole steps chosen together: stages, schedule, micro-batch, recomputation, ZeRO and the mesh inside a stage."""
