"""T5 and its relatives for modulm."""
