"""A page at `/`: a chat, or a comparison of texts for models that pool."""
