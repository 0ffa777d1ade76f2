"""The command `config`."""
