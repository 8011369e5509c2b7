"""Pins: read, checked against the available strategies, applied to the problem."""
