"""The graph against its model, and its examples apart."""
