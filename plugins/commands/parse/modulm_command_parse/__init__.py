"""The command `parse`."""
