"""openPangu Embedded and Ultra MoE for modulm."""
