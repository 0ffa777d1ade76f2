"""Runs the engine beside an event loop, in a thread or in a process of its own."""
