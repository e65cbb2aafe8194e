"""Rounds: units of ranks that train by themselves between exchanges, which is approximate."""
