"""The command `kv`."""
