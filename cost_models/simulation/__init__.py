"""Simulate the step of every rank, with overlap."""
