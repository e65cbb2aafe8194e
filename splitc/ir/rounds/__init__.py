"""Rounds: units of ranks train by themselves, and average their parameters after some updates."""
