"""What ranks do in a step, and in which order."""
