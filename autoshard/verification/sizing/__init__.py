"""Chooses reduced sizes and shorter mesh axes for verification of a plan."""
