"""`splitc demo`: one small model, trained in one process, under DDP and by splitc, compared."""
