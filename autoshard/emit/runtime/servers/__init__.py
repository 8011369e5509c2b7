"""Parameter servers: what servers and workers do, and who gets which share, without a word of how they talk."""
