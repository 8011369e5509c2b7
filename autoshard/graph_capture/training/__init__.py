"""Additions to a forward graph for training: loss, gradients, saved tensors, precision. No torch."""
