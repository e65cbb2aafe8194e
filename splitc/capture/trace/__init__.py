"""From the model's Python to a graph, on fake tensors of two batch sizes."""
