"""Banks keep their contract."""

from __future__ import annotations

import pytest

from modulm.testing import kit
from modulm.testing.adapters import FakeAdapters
from modulm_adapter_lora.bank import LoraBank


@pytest.mark.parametrize("bank", [LoraBank, FakeAdapters])
def test_a_bank_keeps_the_contract(bank):
    kit.check("adapters", bank)


def test_a_bank_that_changes_what_it_should_not_is_found():
    class Broken(FakeAdapters):
        def begin(self, slots):
            super().begin(None if slots is None else slots + 1)

        def layer(self, spec):
            around = super().layer(spec)
            if around is not None:
                around.down[:], around.up[:] = 1, 1
            return around

    with pytest.raises(AssertionError, match="linear: must be unchanged"):
        kit.check("adapters", Broken)
