"""Numbers of a cluster from measurements: devices, links, the lines fitted to them, and what the lines miss."""
