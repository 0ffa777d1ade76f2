"""`modulm bench`: benchmarks of a model in this process or of any OpenAI-compatible server."""
