"""Acme's price list, which every tool of the plugin shares. It stands beside this file, in the plugin's directory."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

_LIST = json.loads((Path(__file__).resolve().parent / "prices.json").read_text(encoding="utf-8"), parse_float=Decimal)
RATES: dict[str, Decimal] = {currency: Decimal(rate) for currency, rate in _LIST["rates"].items()}
PRICES: dict[str, Decimal] = {article: Decimal(price) for article, price in _LIST["prices"].items()}
