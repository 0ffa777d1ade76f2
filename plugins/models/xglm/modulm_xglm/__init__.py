"""XGLM for modulm."""
