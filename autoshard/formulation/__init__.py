"""Graph, rules and costs as a `Problem`, and the meaning of each of its numbers."""
