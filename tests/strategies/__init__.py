"""Tests of what a new strategy takes."""
