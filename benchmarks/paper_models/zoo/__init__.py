"""Models after their papers: a file for each kind, whose MODELS gives name -> Paper."""
