"""A plugin's tool: what an order costs, by the price list that the plugin brings along."""

from __future__ import annotations

import os
from decimal import Decimal
from typing import Any

from rates import PRICES, RATES  # from the plugin's directory

CENT = Decimal("0.01")


def price_quote(items: dict[str, int], currency: str = "") -> dict[str, Any]:
    """What ``items`` (``{"anvil": 2}``) cost; ``currency`` is that of the agent's REPORT_CURRENCY where none is given.

    Raises ``ValueError`` for an article, a count or a currency that there is not.
    """
    currency = currency or os.environ.get("REPORT_CURRENCY") or "EUR"
    if currency not in RATES:
        raise ValueError(f"there are no prices in {currency!r:.40}; there are in {', '.join(RATES)}")
    if not isinstance(items, dict) or not items:
        raise ValueError('items must name at least one article and its count, such as {"anvil": 2}')
    lines: dict[str, Decimal] = {}
    for article, count in items.items():
        if article not in PRICES:
            raise ValueError(f"there is no article {article!r:.40}; there are {', '.join(PRICES)}")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1_000_000:
            raise ValueError(f"the count of {article} must be a whole number from 1 to 1000000")
        lines[article] = (PRICES[article] * RATES[currency]).quantize(CENT) * count
    # Amounts are texts: a float would round them.
    return {
        "currency": currency,
        "lines": {article: str(amount) for article, amount in lines.items()},
        "total": str(sum(lines.values())),
    }
