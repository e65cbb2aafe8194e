"""Parameters that servers hold: workers push gradients to them and pull what they have updated."""
