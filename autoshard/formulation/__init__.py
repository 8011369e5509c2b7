"""Graph, rules and costs as a `Problem`, and the meaning of its numbers."""
