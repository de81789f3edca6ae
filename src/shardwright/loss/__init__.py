"""The objective, and how to compute the loss without whole logits."""
