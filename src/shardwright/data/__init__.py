"""From files to microbatches. Order of reading: files, records, formats (samples), encode (tokens), documents, packing, table
(rows), prepare, order, loader; streaming/ gives the same rows from a stream.

Nothing is imported here, so that `prepare` finds its cache without loading torch.
"""
