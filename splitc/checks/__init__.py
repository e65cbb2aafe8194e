"""Checks of a program: each returns what is wrong, one line for each problem."""
