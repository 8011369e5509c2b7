"""A model whose operators have places: its parts, and the order in which they run."""
