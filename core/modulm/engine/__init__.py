"""The engine (see docs/architecture.md)."""
