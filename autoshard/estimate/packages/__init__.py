"""Predicts packages that `autoshard plan` would write, by its search and prices."""
