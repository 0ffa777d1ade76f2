"""InternVL 2.5 to 3.5 for modulm."""
