"""Price messages and collectives."""
