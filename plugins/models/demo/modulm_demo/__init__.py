"""A small trained chat model that travels inside the package.

It lets `modulm serve demo` answer on a machine with no network and no GPU. It knows a fixed table
of facts, small arithmetic, tool calls, filling JSON objects, and modulm itself, and says so when it
does not know. `modulm_demo.recipe` holds the seeded text generator and the training that made it.
"""

from pathlib import Path

__all__ = ["checkpoint"]


def checkpoint() -> Path:
    """Return the folder with `config.json`, the weights, and the tokenizer."""
    return Path(__file__).parent / "checkpoint"
