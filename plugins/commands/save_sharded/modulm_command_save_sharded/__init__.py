"""modulm save-sharded: what a rank holds of a model, in files of its own."""
