"""What the command line can train out of the box."""
