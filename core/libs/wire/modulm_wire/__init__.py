"""Values of the engine as bytes: what processes send one another (msgpack, never pickle)."""
