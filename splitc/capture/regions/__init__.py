"""Modules that stay the user's own code: what is seen of them when they run."""
