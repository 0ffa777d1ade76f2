"""CSM for modulm."""
