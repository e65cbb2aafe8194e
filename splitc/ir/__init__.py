"""The data that passes share: programs, plans, clusters, communication nodes, actions."""
