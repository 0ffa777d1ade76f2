"""EXAONE 4 and K-EXAONE for modulm."""
