"""`modulm run-batch`: runs OpenAI batch files without a server."""
