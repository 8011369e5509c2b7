"""What training adds to a forward graph: loss, gradients, tensors that autograd keeps, precision. No torch."""
