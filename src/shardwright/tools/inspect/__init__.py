"""What the model sees: rows with their trained tokens and their context, and the padding of each way of batching."""
