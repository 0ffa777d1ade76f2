"""HRM-Text for modulm."""
