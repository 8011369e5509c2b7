"""Resizes a graph to another batch size or sequence length."""
