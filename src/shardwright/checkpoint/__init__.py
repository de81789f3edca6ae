"""Checkpoints: which state there is (`state`), and how it is written, found and read back (`store`)."""
