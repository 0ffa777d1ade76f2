"""A small trained chat model that is included in the package.

It lets `modulm serve demo` answer on a machine without network or GPU. It knows tables of facts,
small arithmetic, tool calls, filling JSON objects, small talk, poems and modulm itself, and says so
when it does not know. `modulm_demo.recipe` has the seeded text generator and the training code.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from modulm.contracts.checkpoint import NamedCheckpoint

__all__ = ["Demo", "DemoEagle"]

#: Number of texts, and a held-out seed.
_TEXTS, _TEXTS_SEED = 400, 2026


class Demo(NamedCheckpoint):
    """The checkpoint beside this file: config.json, weights, tokenizer, chat template."""

    name = "demo"
    api = 2

    @classmethod
    def source(cls) -> Path:
        return Path(__file__).parent / "checkpoint"

    @classmethod
    def texts(cls) -> Iterator[str]:
        """Yield held-out conversations of the recipe."""
        from transformers import AutoTokenizer

        from modulm_demo.recipe.generator import CATEGORIES, heldout
        from modulm_demo.recipe.tokenizer import render

        tokenizer = AutoTokenizer.from_pretrained(cls.source())
        each = [heldout(_TEXTS_SEED, name, _TEXTS // len(CATEGORIES)) for name in CATEGORIES]
        for some in itertools.zip_longest(*each):
            yield from (render(tokenizer, example) for example in some if example)


class DemoEagle(NamedCheckpoint):
    """An EAGLE head that drafts for `demo`: --spec-method eagle --spec-model demo-eagle."""

    name = "demo-eagle"
    api = 2

    @classmethod
    def source(cls) -> Path:
        return Path(__file__).parent / "drafter"
