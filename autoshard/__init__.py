"""autoshard: splits a PyTorch model over a cluster. Light on purpose: importing it imports no torch and no numpy."""

__version__ = "0.1.0"
