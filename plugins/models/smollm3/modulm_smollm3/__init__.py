"""SmolLM 3 for modulm."""
