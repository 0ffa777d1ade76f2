"""Adapters beside a model: flags, files, resolvers. What applies them is a plugin."""
