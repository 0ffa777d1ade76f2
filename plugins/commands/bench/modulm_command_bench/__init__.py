"""`modulm bench`: how fast a model answers, in this process or behind any OpenAI-compatible URL."""
