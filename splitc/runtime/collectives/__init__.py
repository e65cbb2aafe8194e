"""The collectives that generated code uses, built on a transport."""
