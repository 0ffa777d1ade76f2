"""OpenAI's files and batches: jobs of many requests, run by this server."""
