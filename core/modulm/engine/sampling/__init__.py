"""From logits to tokens, and the checks of what a request asks for."""
