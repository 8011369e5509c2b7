"""Chooses the mesh of each place for the parts that run there."""
