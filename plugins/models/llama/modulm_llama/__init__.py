"""Llama 2 to 3.x, Mistral and Ministral for modulm."""
