"""A KV connector that stores blocks in host memory."""
