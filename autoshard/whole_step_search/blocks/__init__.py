"""Computes time and memory of a block of layers for each of its shardings, simulated once for a whole step."""
