"""From files to the rows of an update: prepare (sources, tokenise, table), order, loader.

Nothing is imported here, so that `prepare` finds its cache without loading torch.
"""
