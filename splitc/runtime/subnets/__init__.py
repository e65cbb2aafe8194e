"""Independent subnets: the neurons of layers are dealt to the ranks of a round (IST)."""
