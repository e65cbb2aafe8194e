"""Capture a model, its loss and an example batch as a Program."""
