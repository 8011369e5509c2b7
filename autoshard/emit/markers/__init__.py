"""Reads the calls with an effect back from emitted classes and checks them against the program."""
