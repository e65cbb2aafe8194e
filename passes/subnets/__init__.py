"""Passes of independent subnets."""
