"""Types of the arrays in data/, and the row id of a filler row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

FILLER = -1
"""The row id of a filler row, which completes a microbatch: padding only, no targets."""
