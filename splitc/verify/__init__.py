"""Show that a compiled program is the same training as one process."""
