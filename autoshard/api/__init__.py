"""The Python interface: what the command line does too, in a program."""
