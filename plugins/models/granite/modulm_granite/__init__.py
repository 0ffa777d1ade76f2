"""Granite 3 and 4, and Bamba, for modulm."""
