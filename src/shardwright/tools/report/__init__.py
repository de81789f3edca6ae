"""One self-contained HTML page about runs and measured layouts: figures as inline SVG, with their numbers as tables."""
