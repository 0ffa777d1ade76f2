"""FireRedASR and FireRedLID for modulm."""
