"""Runs torch.export, handles or refuses what a trace cannot hold, and returns one functional torch graph."""

LISTED = 256  # elements of a tensor, calls that make it, columns of a table: written out one by one
ONE_BY_ONE = 1 << 16  # elements that are looked at one by one
LARGE_ELEMENTS = 1 << 20  # above it a new tensor has no values: constructors read rates, frequencies, sizes
PACKED_ELEMENTS = 1 << 22  # above it no pattern is looked for: a mask of 2,048 tokens
LARGEST_ELEMENTS = 1 << 26  # of what is computed while a model is captured: a mask of 8,192 tokens
