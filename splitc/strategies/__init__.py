"""The strategies, each whole in its file: its options, its plans, what it allows and why it may have none."""
