"""MiniCPM-V for modulm."""
