"""A web page at `/`: a chat, or a comparison of texts for pooling models."""
