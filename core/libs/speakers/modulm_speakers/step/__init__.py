"""The step part of models that speak."""
