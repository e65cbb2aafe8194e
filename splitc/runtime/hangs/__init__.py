"""Waits in vain: every rank is asked what it does, one prints a page that names the cause, and all end."""
