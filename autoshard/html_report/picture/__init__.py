"""A plan as an SVG drawing."""
