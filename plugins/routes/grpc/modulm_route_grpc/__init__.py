"""vLLM's gRPC services beside modulm's HTTP routes, which answer the calls."""
