"""The contract kit for adapter resolvers.

    from modulm_adapters.testing import check_resolver

    def test_contract():
        check_resolver(MyResolver, sample=set_up)

`sample(folder)` puts an adapter where the resolver finds it and returns the flags that turn the
resolver on, as a mapping, and the adapter's name. The static method `kit_sample` on the class does
the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modulm.config import EngineConfig
from modulm.errors import ModulmError
from modulm.testing.kit import sample_of
from modulm_adapters.resolver import AdapterResolver

__all__ = ["check_resolver"]

#: Names that clients may send, and that must not become paths.
_HOSTILE = (
    "", ".", "..", "/", "/etc", "../outside", "a/../../outside", "known/../../outside",
    "..\\outside", "~", "~root", "\0", "known\0", "x" * 5000, "known\n", "%2e%2e/outside", "*",
)  # fmt: skip


def check_resolver(
    driver: type[AdapterResolver],
    *,
    sample: Callable[[Path], tuple[Mapping[str, Any], str]] | None = None,
) -> None:
    """Run the kit. Raises AssertionError with what was expected, KitNotRun without a sample."""
    assert driver.name, "the resolver has no name"
    off = driver.of(EngineConfig())
    assert off is None or isinstance(off, driver), f"of() gave {off!r}, not a resolver or None"
    set_up = sample_of(driver, sample, "an adapter to find")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        _write_adapter(root / "outside")
        folder = root / "folder"
        folder.mkdir()
        flags, known = set_up(folder)
        resolver = driver.of(EngineConfig.from_keywords(**flags))
        assert isinstance(resolver, driver), f"of() gave {resolver!r} with {dict(flags)}"
        for _ in range(2):
            path = resolver.resolve(known)
            assert isinstance(path, Path), f"resolve({known!r}) gave {path!r}, not a path"
            assert path.is_dir(), f"resolve({known!r}) gave {path}, which is no folder"
        for hostile in ("no-such-adapter", *_HOSTILE):
            _check_hostile(resolver, hostile, root)


def _write_adapter(folder: Path) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").touch()


def _check_hostile(resolver: AdapterResolver, name: str, root: Path) -> None:
    shown = repr(name[:40])
    try:
        path = resolver.resolve(name)
    except ModulmError:
        return
    except Exception as error:
        raise AssertionError(
            f"resolve({shown}) raises {type(error).__name__}; None was expected"
        ) from error
    assert path is None, (
        f"resolve({shown}) gave {path}, not None: names of clients must not become paths"
    )
