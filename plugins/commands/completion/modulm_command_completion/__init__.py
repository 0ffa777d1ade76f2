"""`modulm completion`: shells complete commands, flags and names."""
