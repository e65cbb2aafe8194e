"""Start ranks, load their generated files, train them."""
