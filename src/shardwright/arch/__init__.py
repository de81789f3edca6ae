"""What a model is made of, read from its config.json without torch: parameters, matrix products, FLOPs."""

from shardwright.arch.inventory import (
    Counts,
    Group,
    Matmul,
    Shape,
    counts,
    generic_shape,
    matmuls,
    parameters,
    shape_from_config,
)

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
