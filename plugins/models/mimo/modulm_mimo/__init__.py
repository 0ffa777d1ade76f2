"""MiMo V2 for modulm."""
