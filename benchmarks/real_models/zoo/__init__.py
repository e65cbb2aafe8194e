"""Models of third-party packages: a file for each kind, whose MODELS gives name -> Entry."""
