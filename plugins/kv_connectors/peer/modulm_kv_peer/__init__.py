"""A KV connector between engines: one computes prompts, another continues them."""
