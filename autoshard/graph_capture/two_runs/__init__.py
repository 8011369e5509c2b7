"""Compares runs of a forward: training with evaluation, a first call with a second, float32 with autocast."""
