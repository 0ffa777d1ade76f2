"""K2 Horizon for modulm."""
