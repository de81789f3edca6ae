"""Attention over pieces of rows."""
