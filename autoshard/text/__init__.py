"""Plans as text: the summary, explanations, and differences between two plans."""
