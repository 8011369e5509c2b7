"""torch.export and what a trace can't hold: followed, answered or refused; then one functional torch graph."""
