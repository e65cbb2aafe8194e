"""Third-party models, compiled, compared with eager and trained under several strategies, one process each."""
