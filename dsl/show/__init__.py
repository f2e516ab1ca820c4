"""A declared model as a tree, a table, an SVG drawing and an HTML page."""
