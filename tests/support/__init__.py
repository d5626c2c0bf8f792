"""What tests share: scripted engines and runners, drivers, judges."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""

DATA = ROOT / "tests" / "data"
"""Recorded answers of real engines."""
