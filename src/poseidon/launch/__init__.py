"""Starting one command on every host or rank, and ending them all."""
