"""The command `collect-env`."""
