"""The table of operators, one file a kind."""
