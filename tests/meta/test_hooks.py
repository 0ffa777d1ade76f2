"""docs/hooks.md says of every hook what hookspecs.py says, and a test answers every hook.

`python tests/meta/test_hooks.py` writes the page.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from modulm.plugins import hookspecs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/hooks.md"
HEAD = """\
# Hooks

A hook is a question or a notice that any number of plugins answer. A hook plugin is a module in
the entry-point group `modulm`:

```toml
[project.entry-points."modulm"]
greeting = "modulm_hooks_greeting"
```

Its functions are marked with `modulm.plugins.hookimpl` and may leave out arguments that they do
not need. `modulm plugins new hooks NAME` writes such a package. This page is generated from
`core/modulm/plugins/hookspecs.py` by `python tests/meta/test_hooks.py`.
"""


def hooks() -> dict[str, object]:
    return {
        name: value for name, value in vars(hookspecs).items() if re.match(r"modulm_[a-z_]+$", name)
    }


def entry(name: str, hook: object) -> str:
    assert inspect.isfunction(hook)
    options = hook.modulm_spec  # type: ignore[attr-defined]
    kinds = [word for word in ("firstresult", "historic") if options[word]]
    title = f"## {name}({', '.join(inspect.signature(hook).parameters)})"
    mark = f"\n\n*{', '.join(kinds)}*" if kinds else ""
    return f"{title}{mark}\n\n{inspect.getdoc(hook)}\n"


def page() -> str:
    return "\n".join([HEAD, *(entry(name, hook) for name, hook in hooks().items())])


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python tests/meta/test_hooks.py"


def test_every_hook_is_public_and_explained() -> None:
    assert set(hooks()) == {name for name in hookspecs.__all__ if name.startswith("modulm_")}
    for name, hook in hooks().items():
        text = inspect.getdoc(hook) or ""
        assert len(text) > 40, name
        for argument in inspect.signature(hook).parameters:  # type: ignore[arg-type]
            explained = f"`{argument}`" in text or "as `modulm_" in text or "Arguments" in text
            assert explained, f"{name}: {argument}"


def test_every_hook_is_asked_and_answered_by_a_test() -> None:
    core = {
        path: path.read_text()
        for path in (ROOT / "core").rglob("*.py")
        if path.name != "hookspecs.py"
    }
    commands = [path.read_text() for path in (ROOT / "plugins/commands").rglob("*.py")]
    tests = {path: path.read_text() for path in (ROOT / "tests/unit").rglob("*.py")}
    for name in hooks():
        asked = any(name in text for text in core.values())
        asked = asked or any(f'gather("{name}")' in text for text in commands)
        assert asked, f"nothing asks {name}"
        answered = (f"def {name}(", f'"{name}"')
        assert any(word in text for text in tests.values() for word in answered), name


if __name__ == "__main__":
    PAGE.write_text(page())
