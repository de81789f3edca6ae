"""Models: built on the meta device, then only this rank's part is initialised or read."""

from shardwright.models.build import build_model
from shardwright.models.materialise import materialise
from shardwright.models.model_parts import Parts, find_parts

__all__ = ["Parts", "build_model", "find_parts", "materialise"]
