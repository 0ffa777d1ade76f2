"""Several replicas of a model: flags, the router between them, and who may connect."""
