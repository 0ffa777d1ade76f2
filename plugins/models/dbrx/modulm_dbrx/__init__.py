"""DBRX for modulm."""
