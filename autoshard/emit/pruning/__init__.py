"""Removal from a package of what its plan does not need."""
