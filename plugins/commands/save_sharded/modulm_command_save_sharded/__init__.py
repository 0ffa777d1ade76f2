"""modulm save-sharded: writes separate checkpoint files for each rank."""
