"""The performance models of the papers, under their equation numbers."""
