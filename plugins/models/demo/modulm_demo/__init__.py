"""A small trained chat model that travels inside the package.

It lets `modulm serve demo` answer on a machine with no network and no GPU. It knows a fixed table
of facts, small arithmetic, tool calls, filling JSON objects, and modulm itself, and says so when it
does not know. `modulm_demo.recipe` holds the seeded text generator and the training that made it.
"""

from pathlib import Path

from modulm.contracts.checkpoint import NamedCheckpoint

__all__ = ["Demo"]


class Demo(NamedCheckpoint):
    """The checkpoint beside this file: config.json, weights, tokenizer, chat template."""

    name = "demo"
    api = 2

    @classmethod
    def source(cls) -> Path:
        return Path(__file__).parent / "checkpoint"
