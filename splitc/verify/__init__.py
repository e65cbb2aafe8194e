"""Compare the training of a compiled program with that of one process."""
