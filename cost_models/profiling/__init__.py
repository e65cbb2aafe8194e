"""Measure layers on this machine."""
