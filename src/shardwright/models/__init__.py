"""Models: built on the meta device, then only this rank's part is initialised or read."""

from shardwright.models.adapters import Parts, find_parts
from shardwright.models.build import build_model
from shardwright.models.materialise import materialise

__all__ = ["Parts", "build_model", "find_parts", "materialise"]
