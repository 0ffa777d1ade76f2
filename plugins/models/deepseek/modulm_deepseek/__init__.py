"""DeepSeek V2 and V3 for modulm."""
