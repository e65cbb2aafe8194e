"""Measurements of what the compiled programs really do: bytes that the kernel counts, on a network of their own.

Each script runs as `python -m benchmarks.<name>` from the root of the repository; README.md says what they are.
"""
