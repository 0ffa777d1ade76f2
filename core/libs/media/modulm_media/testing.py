"""The contract kit for media families.

    from modulm_media.testing import check_family

    def test_contract():
        check_family(MyFamily, sample=lambda: (processor, config))

`sample()` returns the checkpoint's processor and its config.json; the static method `kit_sample` on
the class does the same. Whole models are compared with transformers by `modulm_towers.testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from modulm.errors import RequestError
from modulm.testing.kit import sample_of
from modulm_media.family import MediaFamily
from modulm_media.flags import KINDS, MediaKind
from modulm_media.values import Media, Processed, Sound, Video

__all__ = ["check_family"]


def check_family(
    driver: type[MediaFamily],
    *,
    sample: Callable[[], tuple[Any, Mapping[str, Any]]] | None = None,
) -> None:
    """Run the kit. Raises AssertionError with what was expected, KitNotRun without a sample."""
    assert driver.kinds, "the family takes no kind of media"
    unknown = set(driver.kinds) - set(KINDS)
    assert not unknown, f"there is no kind of media {', '.join(sorted(unknown))}"
    assert isinstance(driver.bidirectional, bool | property), "bidirectional is not a bool"
    processor, config = sample_of(driver, sample, "a processor and a config.json")()
    family = driver(processor, config)
    for kind in family.kinds:
        _check_kind(family, cast("MediaKind", kind))
    start = list(family.start())
    assert all(isinstance(token, int) for token in start), f"start() gave {start}"


def _media(kind: MediaKind, number: int) -> Media:
    draw = np.random.default_rng(number)
    if kind == "image":
        from PIL import Image

        size = (48 + 16 * number, 32 + 16 * number, 3)
        value: Any = Image.fromarray(draw.integers(0, 255, size, dtype=np.uint8))
    elif kind == "audio":
        value = Sound(draw.standard_normal(16_000 + 4000 * number).astype(np.float32), 16_000)
    else:
        value = Video(draw.integers(0, 255, (4 + number, 32, 32, 3), dtype=np.uint8), fps=2.0)
    return Media(kind, value)


def _check_kind(family: MediaFamily, kind: MediaKind) -> None:
    mark = family.mark(kind)
    assert isinstance(mark, str), f"mark({kind!r}) gave {mark!r}"
    assert mark, f"mark({kind!r}) is empty"
    document = family.document(kind, True)
    assert mark in document, f"document({kind!r}) gave {document!r}, without the mark {mark!r}"
    features = list(family.features(kind))
    assert features, f"features({kind!r}) gave no token"
    valid = all(isinstance(token, int) and token >= 0 for token in features)
    assert valid, f"features({kind!r}) gave {features}, not token ids"
    for number in range(2):
        media = _media(kind, number)
        first, second = (family.process(media, {}) for _ in range(2))
        _check_processed(family, kind, first)
        assert np.array_equal(first.tokens, second.tokens), f"{kind}: two results for one item"
        for name, tensor in first.tensors.items():
            same = np.array_equal(tensor, second.tensors[name], equal_nan=True)
            assert same, f"{kind}: two results for one item in {name}"
        _check_prompt(family, first)
    try:
        family.process(_media(kind, 0), {"no_such_option": object()})
    except RequestError:
        return
    except Exception as error:
        raise AssertionError(
            f"{kind}: an unknown option raises {type(error).__name__}, not RequestError"
        ) from error


def _check_processed(family: MediaFamily, kind: str, processed: Processed) -> None:
    assert isinstance(processed, Processed), f"{kind}: process() gave {processed!r}"
    assert processed.kind == kind, f"{kind}: process() says that it is {processed.kind!r}"
    tokens, embedded = processed.tokens, processed.embedded
    assert tokens.dtype == np.int64, f"{kind}: tokens are {tokens.dtype}, not int64"
    assert tokens.ndim == 1, f"{kind}: tokens have the shape {tokens.shape}"
    assert embedded.dtype == np.bool_, f"{kind}: embedded is {embedded.dtype}, not bool"
    assert embedded.shape == tokens.shape, f"{kind}: embedded is not as long as tokens"
    if not (family.crosses or family.looks):
        assert embedded.any(), f"{kind}: no token gets an embedding of the encoder"
        inside = np.isin(tokens[embedded], list(family.features(kind)))
        assert inside.all(), f"{kind}: embedded tokens are not among features()"
    else:
        assert processed.encoder_outputs > 0, f"{kind}: the item has no encoder outputs"
    assert processed.tensors, f"{kind}: the encoder gets no tensors"
    for name, tensor in processed.tensors.items():
        assert isinstance(tensor, np.ndarray), f"{kind}: {name} is {type(tensor).__name__}"
        finite = tensor.dtype.kind not in "fc" or np.isfinite(tensor).all()
        assert finite, f"{kind}: {name} has infinite values or NaN"
    for first, end in processed.spans:
        assert 0 <= first < end <= len(tokens), f"{kind}: span {(first, end)} is outside"


def _check_prompt(family: MediaFamily, processed: Processed) -> None:
    """Check the positions of a prompt of two text tokens, the item, and one text token."""
    prompt = np.concatenate([[1, 2], processed.tokens, [3]]).astype(np.int64)
    positions = family.positions(prompt, [(2, processed)])
    if positions is not None:
        assert positions.ndim == 2, f"positions() gave the shape {positions.shape}"
        assert positions.shape[1] == len(prompt), (
            f"positions() gave {positions.shape[1]} positions for {len(prompt)} tokens"
        )
        assert (positions >= 0).all(), "positions() gave negative positions"
