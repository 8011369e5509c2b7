"""Graph to graph: one spelling for operators that mean the same, and folds of several into one. No torch."""
