"""Writes the job file of a scheduler into a package from a template, and starts it where that is possible."""
