"""Core attention: over whole rows, packed rows and documents, and what a model must do to have them."""
