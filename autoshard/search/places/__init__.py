"""Searches for places of modules that have none: the shortest step."""
