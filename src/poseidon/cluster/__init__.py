"""The hosts and the links between them: described, emulated, probed."""
