"""Load checkpoints in Mistral's own format."""
