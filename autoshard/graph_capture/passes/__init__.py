"""Passes from graph to graph: one spelling for equivalent operators, and fusions of several into one. No torch."""
