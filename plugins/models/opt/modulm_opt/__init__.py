"""OPT for modulm."""
