"""Prices: FLOPs, bytes and seconds of layers and messages, on described or measured clusters."""
