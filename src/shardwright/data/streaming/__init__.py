"""Rows of data that are read while training runs."""
