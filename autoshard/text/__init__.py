"""A plan in a reader's words: the summary, why it is as it is, and how two differ."""
