"""The training loop: objective, optimizer, update, loop."""
