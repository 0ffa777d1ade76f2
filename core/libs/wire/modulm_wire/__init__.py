"""Serialization of the engine's values for other processes (msgpack, never pickle)."""
