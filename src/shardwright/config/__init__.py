"""The run file: its schema, and how files, overrides and defaults become one checked configuration."""

from shardwright.config.load import Loaded, load_run_file, parse_overrides
from shardwright.config.schema import RunFile

__all__ = ["Loaded", "RunFile", "load_run_file", "parse_overrides"]
