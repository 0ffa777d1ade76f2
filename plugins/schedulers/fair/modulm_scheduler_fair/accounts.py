"""Accounts of tenants: the tokens computed for each, relative to its weight.

The level of a tenant is the number of tokens computed for it, divided by its weight. Deficit round
robin keeps the levels of tenants that have work together: whoever has the lowest one is next. The
unused share of a tenant without enough work goes to the others and is not owed to it later, except
for one quantum: its next request goes ahead of theirs, as new flows do in FQ-CoDel (RFC 8290).
"""

from __future__ import annotations

import numpy as np

__all__ = ["Accounts", "divide"]

_FIRST = 8
#: Quanta of service that a tenant whose requests cannot be admitted may be owed.
_MOST_OWED = 2


class Accounts:
    """Arrays over tenants, which are numbered in the order in which they first appear.

    level, weight: [tenants]. waiting: tokens of waiting requests. requests: number of them.
    clock: the level of tenants that are served and have more work. quantum: tokens by which
    tenants may differ.
    """

    def __init__(self) -> None:
        self.quantum = 0
        self.clock = 0.0
        self._numbers: dict[str, int] = {}
        self.level = np.zeros(_FIRST)
        self.weight = np.ones(_FIRST)
        self.waiting = np.zeros(_FIRST, dtype=np.int64)
        self.requests = np.zeros(_FIRST, dtype=np.int64)
        #: Tokens of requests that were admitted in the step being planned.
        self.joined = np.zeros(_FIRST, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, tenant: str, weight: float | None = None) -> int:
        """Return the number of a tenant, and set its weight if one is given."""
        number = self._numbers.get(tenant)
        if number is None:
            number = len(self._numbers)
            if number == len(self.level):
                self._widen()
            self.level[number] = self.clock - self.quantum / (weight or 1.0)
            self._numbers[tenant] = number
        if weight is not None:
            self.weight[number] = weight
        return number

    def _widen(self) -> None:
        for name in ("level", "weight", "waiting", "requests", "joined"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))

    def find(self, tenant: str) -> int | None:
        """Return the number of a tenant, or None if it has had no request. Changes nothing."""
        return self._numbers.get(tenant)

    def turn(self, number: int) -> float:
        """Return a sort key: the tenant with the smallest one is next in this step."""
        return float(self.level[number] + self.joined[number] / self.weight[number])

    def owed(self, number: int, to: int) -> float:
        """Return the tokens that tenant `to` is behind tenant `number`."""
        return float((self.level[number] - self.level[to]) * self.weight[to])

    def charge(self, tokens: np.ndarray, unmet: np.ndarray) -> None:
        """Record the tokens computed in a step. tokens: [tenants]. unmet: [tenants] bool, tenants
        whose work did not fit.
        """
        count = len(self)
        level, weight = self.level[:count], self.weight[:count]
        level += tokens / weight
        self.joined[:count] = 0
        served = tokens > 0
        if not served.any():
            return
        limited = served & unmet
        clock = level[limited].min() if limited.any() else level[served].max()
        self.clock = max(self.clock, float(clock))
        owed = np.where(unmet, _MOST_OWED, 1) * self.quantum / weight
        np.maximum(level, self.clock - owed, out=level)


def divide(
    budget: int, demand: np.ndarray, least: np.ndarray, level: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """Divide a step's budget so that the lowest levels rise first.

    All arrays are [tenants]. Each gets at least `least` and at most `demand` tokens; in between,
    the levels after the step are equal. demand.sum() must exceed the budget, least.sum() must not.
    Returns tokens, [tenants] int64.
    """
    points = np.concatenate([level + least / weight, level + demand / weight])
    order = np.argsort(points, kind="stable")
    points = points[order]
    rates = np.cumsum(np.concatenate([weight, -weight])[order])
    totals = least.sum() + np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(points))])
    at = max(int(np.searchsorted(totals, budget, side="right")) - 1, 0)
    rate = rates[at]
    target = points[at] + ((budget - totals[at]) / rate if rate > 1e-12 else 0.0)
    exact = np.clip(weight * (target - level), least, demand)
    tokens = np.floor(exact + 1e-6).astype(np.int64)
    rest = int(budget - tokens.sum())
    for number in np.argsort(tokens - exact, kind="stable")[: max(rest, 0)]:
        tokens[number] += tokens[number] < demand[number]
    return tokens
