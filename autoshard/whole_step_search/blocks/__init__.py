"""Time and memory of a block of layers for each of its shardings, measured once for a whole step."""
