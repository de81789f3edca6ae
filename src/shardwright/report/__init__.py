"""One self-contained HTML page about training runs and measured layouts: figures as inline SVG, with their numbers as tables."""
