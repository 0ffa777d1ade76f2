"""Adapters by name, from a folder."""
