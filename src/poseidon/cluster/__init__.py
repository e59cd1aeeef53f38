"""The hosts and the links between them: described and emulated."""
