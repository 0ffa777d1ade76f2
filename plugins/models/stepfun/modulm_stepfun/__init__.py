"""Step 3 for modulm."""
