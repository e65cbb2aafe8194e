"""Error feedback: what sums of gradients in a short format lose is added to the next ones."""
