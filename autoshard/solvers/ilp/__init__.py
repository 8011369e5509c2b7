"""Integer programming to a proof, and the plans that it begins from."""
