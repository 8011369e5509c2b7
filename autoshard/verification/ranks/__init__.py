"""Runs the ranks of a package, as threads in lock-step or as gloo processes."""
