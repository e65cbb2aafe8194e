"""Predict the memory that a rank needs."""
