"""MiniMax M2 for modulm."""
