"""Existing plans: checked, resized, priced again, printed as a command line."""
