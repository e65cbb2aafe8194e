"""Late multiply: replicas exchange the factors of a weight's gradient (Practical Lessons, section 2.1)."""
