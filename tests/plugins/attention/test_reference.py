"""The reference backend has every feature; plans that hide something are found out."""

from __future__ import annotations

import pytest
from attrs import evolve, field, frozen

from modulm.contracts.attention import AttentionPlan
from modulm.errors import UnsupportedError
from modulm.ops import bind
from modulm.plugins import manager
from modulm.testing.attention import SPECS, check_attention
from modulm.testing.paged_attention import ReferenceAttention, ReferencePlan


@pytest.fixture(scope="module")
def cpu():
    return manager.current().load("platforms", "cpu")()


@pytest.mark.exhaustive
def test_contract(cpu):
    check_attention(ReferenceAttention, cpu)
    used = frozenset().union(*(spec.features for spec in SPECS.values()))
    assert used == ReferenceAttention.features


def test_a_feature_that_a_backend_does_not_know_is_refused(cpu):
    class Old(ReferenceAttention):
        features = frozenset({"window"})

    assert Old.refuses(SPECS["window"], cpu, bind()) is None
    assert Old.refuses(SPECS["sinks and window"], cpu, bind()) == "does not do sinks"
    both = evolve(SPECS["spans"], selection=4)
    assert Old.refuses(both, cpu, bind()) == "does not do selection, spans"


@frozen(eq=False)
class Hiding(ReferencePlan):
    """Keeps the lengths on the host as well, where a recorder does not see them."""

    lengths: tuple[int, ...] = field(default=(), kw_only=True)

    def over(self, tensors, tables):
        plan = super().over(tensors, tables)
        return Hiding(
            plan.block_tables,
            plan.query_starts,
            plan.context_lens,
            plan.slots,
            plan.spans,
            plan.encoder_lens,
            lengths=self.lengths,
        )


class HidingAttention(ReferenceAttention):
    """Attends over as many tokens as its plan says on the host."""

    def plan(self, step):
        plan_of_step = super().plan(step)
        tensors = (
            plan_of_step.block_tables,
            plan_of_step.query_starts,
            plan_of_step.context_lens,
            plan_of_step.slots,
        )
        lengths = tuple(step.context_lens.tolist())
        return Hiding(*tensors, plan_of_step.spans, plan_of_step.encoder_lens, lengths=lengths)

    def forward(self, q, k, v, cache, plan, out, inputs):
        lengths = plan.context_lens.new_tensor(plan.lengths)
        super().forward(q, k, v, cache, evolve(plan, context_lens=lengths), out, inputs)


def test_a_plan_that_hides_what_changes_fails_the_kit(cpu):
    with pytest.raises(AssertionError, match="replayed, gives different bits"):
        check_attention(HidingAttention, cpu)


def test_plans_that_do_not_say_so_are_not_recorded():
    assert AttentionPlan().key() is None
    with pytest.raises(UnsupportedError, match="AttentionPlan cannot be recorded"):
        AttentionPlan().over((), ())
