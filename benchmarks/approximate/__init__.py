"""Approximate training against exact: accuracy over time on a slow network, for DDP, local SGD, IST and `auto`."""
