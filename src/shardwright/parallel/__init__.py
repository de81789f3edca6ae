"""How a model is split over ranks, and how the ranks communicate: one module for each axis, applied in order by `apply`."""
