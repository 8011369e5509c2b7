"""A plan applied to its graph: what every device runs, and the module structure of its code."""
