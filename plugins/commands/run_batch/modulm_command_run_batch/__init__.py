"""`modulm run-batch`: OpenAI batch files answered without a server between."""
