"""Command R and Command A for modulm."""
