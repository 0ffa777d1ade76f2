"""Several replicas of a model: flags, placement, announcements, routing, and the shared secret."""
