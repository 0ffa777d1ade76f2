"""The commands `chat` and `complete`."""
