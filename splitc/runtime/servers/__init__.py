"""Parameters on servers (Stanza 2.2)."""
