"""The rows of data.train from a stream: records, windows of documents, rows by position."""
