"""The engine core: scheduler, loop and executor."""
