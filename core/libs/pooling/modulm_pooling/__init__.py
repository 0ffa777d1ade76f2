"""Step part of pooling models, whose rows return an array instead of tokens."""
