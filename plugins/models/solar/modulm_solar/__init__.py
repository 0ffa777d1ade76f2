"""Solar Pro for modulm."""
