"""Messages and collectives between ranks: over torch.distributed, or between threads."""
