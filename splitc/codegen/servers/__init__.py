"""The lines and files of parameters that servers hold."""
