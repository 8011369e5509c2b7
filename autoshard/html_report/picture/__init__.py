"""A plan as a drawing: SVG written by hand, that prints and stands in documents."""
