"""Conversion of a user's model to a `Graph`: load, trace, translate, run the passes."""
