"""BART and its relatives for modulm."""
