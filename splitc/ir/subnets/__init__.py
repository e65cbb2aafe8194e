"""Independent subnets: every rank trains its part of the hidden neurons, dealt again in each round."""
