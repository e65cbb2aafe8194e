"""Clusters by name, from a file, or measured on this machine."""
