"""The lines and tables of what is dealt to ranks."""
