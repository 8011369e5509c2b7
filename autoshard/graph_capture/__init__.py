"""From what a user named to a `Graph`: load the model, trace it, translate it, run the passes."""
