"""LoRA adapters: flags, files, resolvers, the step part. Adapter banks are plugins."""
