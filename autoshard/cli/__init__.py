"""The command line: options, verbs, exit codes."""
