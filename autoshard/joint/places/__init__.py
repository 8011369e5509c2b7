"""Meshes of places, decided for what these run."""
