"""Clocks, memory and records: the only home of time and of the metrics file."""
