"""How a front end reaches an engine core: in a thread or in another process."""
