"""Passes of training in rounds."""
