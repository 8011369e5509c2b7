"""Blocks in a line onto pipeline stages, each block at one point of its front, with a certificate. numpy only."""
