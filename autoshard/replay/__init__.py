"""A plan that was made before: checked, carried over to other sizes, priced anew, as a command line."""
