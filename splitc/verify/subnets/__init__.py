"""Independent subnets in one process."""
