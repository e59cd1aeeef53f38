"""What was measured, arranged for people and for files."""
