"""MPT for modulm."""
