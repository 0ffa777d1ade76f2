"""The commands `pull`, `list` and `rm`."""
