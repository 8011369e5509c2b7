"""Runs torch.export, handles or refuses what a trace cannot hold, and returns one functional torch graph."""
