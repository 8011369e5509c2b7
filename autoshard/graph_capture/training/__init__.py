"""What training adds to a forward graph: loss, gradients, saved tensors, precision. No torch."""
