"""Capture: from a model, its loss and an example batch to a Program."""
