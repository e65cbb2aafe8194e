"""Models written after their papers, trained on ranks as in a plain loop: `python -m benchmarks.paper_models`."""
