"""Resolve adapter names to repositories of the Hugging Face hub."""
