"""`modulm completion`: shell completion of commands, flags and names."""
