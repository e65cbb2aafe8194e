"""The product broken on purpose, one text at a time, and the tests that find each."""
