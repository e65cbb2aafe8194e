"""Bad input of every kind: it works, or it is refused with one clear error."""
