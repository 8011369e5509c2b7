"""Places that are left open: the assignment of the shortest step."""
