"""How pooling models take part in steps: rows that give one array instead of tokens."""
