"""Graph, rules and costs as a `Problem`, with the way back from a number to what it stands for."""
