"""The objective, and the ways to make it without whole logits."""
