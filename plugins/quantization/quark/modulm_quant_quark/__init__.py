"""AMD Quark checkpoints for modulm."""
