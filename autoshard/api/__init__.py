"""The Python interface: what the command line does, in a program, and the split model in an eager one."""
