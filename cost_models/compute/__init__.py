"""Price computing: count what layers compute, and turn it into seconds."""
