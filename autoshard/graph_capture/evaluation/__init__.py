"""Whether a model in evaluation computes its forward of training, but for dropout."""
