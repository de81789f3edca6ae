"""Layers divided over ranks by the model's own plan."""
