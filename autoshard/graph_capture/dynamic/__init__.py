"""Sizes that a user declares dynamic: what they are, and which numbers of a graph follow them. No torch."""
