"""Count what a rank needs in memory."""
