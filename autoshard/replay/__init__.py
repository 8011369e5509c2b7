"""A plan that was made before: checked, carried over to other sizes, priced again, as a command line."""
