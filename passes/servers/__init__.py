"""Passes of parameters that servers hold."""
