"""PLaMo 3 for modulm."""
