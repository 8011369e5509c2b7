"""Chooses places for modules that have none, for the shortest step."""
