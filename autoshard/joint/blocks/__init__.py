"""What a block of layers costs in each of its splits: time and memory, measured once for a whole step."""
