"""KV transfers: the step part that loads and saves blocks with a KV connector (`part`)."""
