"""Dynamic sizes that a user declares, and the numbers of a graph that depend on them. No torch."""
