"""Runs the engine beside an event loop, in a thread or in another process."""
