"""Runs torch.export, handles or refuses what a trace cannot hold, and returns one functional torch graph."""

READABLE = 64  # elements of a tensor that is written out as numbers
ONE_BY_ONE = 1 << 16  # elements that are looked at one by one
LARGE_ELEMENTS = 1 << 22  # above it numbers are neither packed nor looked for: those that decide anything are fewer
LARGEST_ELEMENTS = 1 << 26  # of what is computed while a model is captured: a mask of 8,192 tokens
