"""What a scheduler reads, written beside a package from a template, and started where that can be."""
