"""Commands for the models of a running server."""
