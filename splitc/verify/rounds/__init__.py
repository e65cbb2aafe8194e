"""Rounds of local updates in one process."""
