"""What a model needs to be trained as subnets."""
