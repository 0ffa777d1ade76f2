"""Llama 2 to 3 and Mistral for modulm."""
