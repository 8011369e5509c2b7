"""Inputs whose dims are symbols: torch.export with them, and the traced program at given sizes."""
