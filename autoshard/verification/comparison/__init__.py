"""Compares every rank's tensors with the reference, and measures rounding."""
