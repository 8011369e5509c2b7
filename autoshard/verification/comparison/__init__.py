"""Every rank's tensors against the reference, and how far rounding alone moves them."""
