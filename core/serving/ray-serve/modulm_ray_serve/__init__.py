"""Models behind Ray Serve: `serve run modulm_ray_serve:app model=...`, or `serve deploy FILE`."""

from modulm_ray_serve.args import AppArgs, ModelArgs
from modulm_ray_serve.build import app

__all__ = ["AppArgs", "ModelArgs", "app"]
