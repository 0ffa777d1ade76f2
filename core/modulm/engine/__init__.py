"""The engine, in rooms of its own (docs/architecture.md)."""
