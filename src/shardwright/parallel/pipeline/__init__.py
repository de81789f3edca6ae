"""Stages cut from a model, run by a schedule's action lists."""
