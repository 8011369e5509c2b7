"""Blocks compiled by `torch.compile`: which operators form one kernel, and its seconds."""
