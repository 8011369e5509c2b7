"""Writes the job file of a scheduler into a package, and starts it."""
