"""The same model at another batch or length than it was captured with."""
