"""What the model sees: rows with their trained, given and padded tokens, and what each way of batching would cost."""
