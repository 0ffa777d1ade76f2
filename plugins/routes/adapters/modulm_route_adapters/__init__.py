"""Adapters of a server."""
