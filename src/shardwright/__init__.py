"""Shardwright: plan, check, run, measure and recover sharded training of PyTorch models."""

__version__ = "0.1.0"
