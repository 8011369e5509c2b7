"""Predicts packages that `autoshard plan` would write, by its own search and prices."""
