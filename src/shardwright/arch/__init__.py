"""A model by its sizes, read from its config.json without torch: parameters, matrix products, FLOPs."""
