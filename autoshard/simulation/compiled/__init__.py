"""Blocks that `torch.compile` has compiled: which operators are one kernel, and its seconds."""
