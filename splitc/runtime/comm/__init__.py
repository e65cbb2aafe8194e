"""The parts of a role's communicator: what generated code calls, by what it is about."""
