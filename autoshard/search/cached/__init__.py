"""A cache of search results between commands, for any level and memory limit."""
