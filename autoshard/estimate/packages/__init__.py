"""Estimates packages of `autoshard plan` by the code that searches and prices plans."""
