"""What a model is made of, read from its config.json without torch: parameters, matrix products, FLOPs."""

from shardwright.arch.inventory import Counts, counts, generic_shape, matmuls, parameters, shape_from_config
from shardwright.arch.shape import Group, Matmul, Shape

__all__ = [
    "Counts",
    "Group",
    "Matmul",
    "Shape",
    "counts",
    "generic_shape",
    "matmuls",
    "parameters",
    "shape_from_config",
]
