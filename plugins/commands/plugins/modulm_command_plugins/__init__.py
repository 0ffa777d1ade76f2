"""The command `plugins`."""
