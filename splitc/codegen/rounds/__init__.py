"""The functions that begin and end a round."""
