"""The batch that a model is captured on, its division, and the loss."""
