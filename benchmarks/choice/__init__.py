"""Is what splitc chooses, planned and tuned, the fastest of all exact plans in reality?  On shaped networks."""
