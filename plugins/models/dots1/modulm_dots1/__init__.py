"""dots.llm1 for modulm."""
