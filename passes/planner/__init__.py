"""Choose a plan: requests, pins, cuts, integer programs, prices."""
