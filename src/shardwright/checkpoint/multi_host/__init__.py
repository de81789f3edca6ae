"""Checkpoints on hosts that do not share a disk."""
