"""Snowflake Arctic for modulm."""
