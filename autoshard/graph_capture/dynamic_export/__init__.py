"""torch.export with symbolic dims, and the traced program at given sizes."""
