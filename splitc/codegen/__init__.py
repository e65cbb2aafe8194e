"""Write a program as Python files that a person can read, diff and edit."""
