"""Adapters by name, from the Hugging Face hub."""
