"""How a model is split over ranks and how the ranks talk: one module per way, put together in `apply`."""
