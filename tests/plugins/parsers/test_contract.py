"""The contract kit over every parser that is installed."""

import pytest

from modulm.plugins import manager
from modulm_parsing.testing import check_parser

PARSERS = [
    (kind, declaration.name)
    for kind in ("tool_parsers", "reasoning_parsers")
    for declaration in manager.current().names(kind)
]


@pytest.mark.parametrize(("kind", "name"), PARSERS, ids=lambda value: str(value))
def test_contract(kind, name):
    check_parser(manager.current().load(kind, name))
