"""Report a plan: the placement of every layer, the reasons, and the predicted step of every strategy."""
