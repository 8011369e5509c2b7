"""The Python interface, with the functions of the command line."""
