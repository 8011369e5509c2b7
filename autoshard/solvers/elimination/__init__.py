"""Exact min-plus elimination of a problem without a memory limit."""
