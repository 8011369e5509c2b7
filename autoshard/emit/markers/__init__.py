"""Calls with an effect in emitted classes, read again and held against the program."""
