"""What the model sees: rows with their trained and other tokens, and the padding of each way of batching."""
