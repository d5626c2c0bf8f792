"""The tools of docs/examples: what they return, what they refuse, and that old Pythons can read them."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import ROOT

EXAMPLES = ROOT / "docs" / "examples"
FILES = sorted(EXAMPLES.rglob("*.py"))

Tool = Callable[..., Any]


def function(path: str, *places: str) -> Any:
    """The function called like the file, with the siblings in ``places`` importable, as a tool's directory makes them."""
    file = EXAMPLES / path
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    written = sys.dont_write_bytecode
    sys.path[:0] = [str(EXAMPLES / place) for place in places]
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = written
        del sys.path[: len(places)]
        for name in set(sys.modules) - before:
            del sys.modules[name]
    return getattr(module, file.stem)


csv_summary: Tool = function("csv_summary/csv_summary.py", "csv_summary")
json_query: Tool = function("basics/json_query.py")
text_diff: Tool = function("basics/text_diff.py")
chart_data: Tool = function("basics/chart_data.py")
date_math: Tool = function("basics/date_math.py")
price_quote: Tool = function("plugins/acme/tools/price_quote.py", "plugins/acme")
host_disk: Tool = function("legacy/host_disk.py")


@pytest.fixture(autouse=True)
def _no_currency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPORT_CURRENCY", raising=False)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_example_is_readable_by_python_3_8_and_uses_the_standard_library_alone(file: Path) -> None:
    tree = ast.parse(file.read_text("utf-8"), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {"columns", "rates"}
    assert {name.split(".")[0] for name in imported} - ours <= sys.stdlib_module_names


# --- csv_summary
TABLE = """\ufeffname,count,price,since,paid,note
anvil,2,89.00,2024-02-29,yes,
"rocket, big",1,1249.5,2023-01-01,no,NA
magnet,,14.95,2025-12-31,yes,-
"""


def test_csv_summary_tells_type_range_and_missing_cells_of_each_column() -> None:
    summary = csv_summary(TABLE)
    assert summary["rows"] == 3
    columns = summary["columns"]
    assert columns["name"] == {"type": "text", "missing": 0, "distinct": 3, "shortest": 5, "longest": 11}
    assert columns["count"] == {"type": "integer", "missing": 1, "distinct": 2, "min": 1, "max": 2, "mean": 1.5}
    assert (columns["price"]["type"], columns["price"]["min"], columns["price"]["max"]) == ("number", 14.95, 1249.5)
    assert columns["price"]["mean"] == pytest.approx(451.15)
    assert columns["since"] == {"type": "date", "missing": 0, "distinct": 3, "min": "2023-01-01", "max": "2025-12-31"}
    assert columns["paid"] == {"type": "boolean", "missing": 0, "distinct": 2, "true": 2}
    assert columns["note"] == {"type": "empty", "missing": 3, "distinct": 0}
    json.dumps(summary, allow_nan=False)


def test_csv_summary_takes_other_delimiters_and_a_header_alone() -> None:
    assert csv_summary("a;b\n1;2\n\n3;4\n", ";")["columns"]["b"]["mean"] == 3
    assert csv_summary("a\n") == {"rows": 0, "columns": {"a": {"type": "empty", "missing": 0, "distinct": 0}}}


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        (["1", "2.5"], "number"),
        (["1", "x"], "text"),
        (["2024-02-30"], "text"),
        (["1e999"], "text"),
        (["1" * 400], "text"),
        (["1e308"] * 9, "number"),
        (["9" * 18], "integer"),
        (["yes", "1"], "text"),
        (["-.5", "+7.", "1E-3"], "number"),
        (["1_000"], "text"),
        (["٣"], "text"),
    ],
)
def test_column_has_a_type_only_where_every_cell_has_it(cells: list[str], kind: str) -> None:
    summary = csv_summary("\n".join(["a", *cells]))
    assert summary["columns"]["a"]["type"] == kind
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"text": ""}, "it is empty"),
        ({"text": 3}, "text must be CSV"),
        ({"text": "a,b\n1\n"}, "line 2 has 1 fields, the first line has 2"),
        ({"text": "a,b\n1,2\n1,2,3\n"}, "line 3 has 3 fields"),
        ({"text": "a,a\n"}, "two columns are called 'a'"),
        ({"text": "a,\n"}, "column 2 has no name"),
        ({"text": 'a\n"x\n'}, "is not CSV"),
        ({"text": "a\n" + "x" * 200_000}, "is not CSV"),
        ({"text": ",".join(f"c{index}" for index in range(501))}, "at most 500"),
        ({"text": "a", "delimiter": ""}, "one character"),
        ({"text": "a", "delimiter": "\n"}, "one character"),
    ],
)
def test_csv_summary_says_what_is_no_csv(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        csv_summary(**arguments)


# --- json_query
DOCUMENT = {"orders": [{"id": 1, "lines": [{"price": 2}, {"price": 3}]}, {"id": 2, "lines": []}], "a.b": {"": 0}}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("", DOCUMENT),
        ("$", DOCUMENT),
        ("orders[0].id", 1),
        ("$.orders[-1].id", 2),
        ('$["orders"][0]["id"]', 1),
        ("orders[*].id", [1, 2]),
        ("orders[*].lines[*].price", [2, 3]),
        ("orders.*.id", [1, 2]),
        ('["a.b"][""]', 0),
    ],
)
def test_json_query_follows_a_path(path: str, value: object) -> None:
    assert json_query(DOCUMENT, path) == value
    assert json_query(json.dumps(DOCUMENT), path) == value


def test_json_query_through_nothing_is_an_empty_list() -> None:
    assert json_query({"a": []}, "a[*].b.c") == []


def test_json_query_takes_a_name_that_begins_with_a_dollar_sign() -> None:
    assert json_query({"$ref": 1, "x": {"$ref": 2}}, "$ref") == 1
    assert json_query({"x": {"$ref": 2}}, "x.$ref") == 2


@pytest.mark.parametrize(
    ("document", "path", "words"),
    [
        ("{", "a", "document is not JSON"),
        pytest.param("[" * 100_000, "[0]", "document is not JSON", id="nested"),
        (DOCUMENT, 3, "path must be a text"),
        (DOCUMENT, "orders[2]", r"\$\[\"orders\"\]\[2\]: the list has 2 items"),
        (DOCUMENT, "orders.id", "a list has no keys"),
        (DOCUMENT, "order", "there is no such key; the object has orders, a.b"),
        (DOCUMENT, "orders[0].id[0]", "a number has no positions"),
        (DOCUMENT, "orders[0].id.*", "a number has nothing to go through"),
        ({"a": True}, "a.b", "a boolean has no keys"),
        ({"a": None}, "a.b", "a null has no keys"),
        ({}, "a", "the object has none"),
        (DOCUMENT, "orders[", r"path has no step at '\['"),
        (DOCUMENT, "orders id", "path has no step at ' id'"),
        (DOCUMENT, "orders..id", "path has no step at"),
        (DOCUMENT, "orders[0]id", "path has no step at 'id'"),
        (DOCUMENT, "orders[99999999999]", "path has no step at"),
        (DOCUMENT, '["\\x"]', "no text as JSON writes it"),
    ],
)
def test_json_query_says_where_a_path_leaves_the_document(document: object, path: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        json_query(document, path)


@given(st.text(alphabet='$.[]*"\\ab-01 ', max_size=12))
def test_json_query_ends_in_a_value_or_a_value_error(path: str) -> None:
    with suppress(ValueError):
        json_query(DOCUMENT, path)


# --- text_diff
def test_text_diff_is_a_unified_diff() -> None:
    assert text_diff("a\nb\nc\n", "a\nB\nc\n", name="letters", context=0) == (
        "--- a/letters\n+++ b/letters\n@@ -2 +2 @@\n-b\n+B\n"
    )


def test_text_diff_shows_a_missing_last_newline() -> None:
    assert text_diff("a\nb", "a\nb\n").endswith("-b\n\\ No newline at end of file\n+b\n")


def test_text_diff_of_equal_texts_is_empty() -> None:
    assert text_diff("a\n", "a\n") == text_diff("", "") == ""


def test_text_diff_splits_at_newlines_alone() -> None:
    diff = text_diff("one\x0ctwo\u2028three\n", "one\x0ctwo\u2028four\n")
    assert "-one\x0ctwo\u2028three\n+one\x0ctwo\u2028four\n" in diff


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"before": 1, "after": ""}, "before must be a text, not int"),
        ({"before": "", "after": None}, "after must be a text"),
        ({"before": "", "after": "", "name": "a\nb"}, "name must be one line"),
        ({"before": "", "after": "", "context": -1}, "context must be"),
        ({"before": "", "after": "", "context": True}, "context must be"),
        ({"before": "\n" * 50_001, "after": ""}, "at most 50,000 are compared"),
    ],
)
def test_text_diff_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        text_diff(**arguments)


# --- chart_data
def test_histogram_counts_every_value_in_one_bin() -> None:
    chart = chart_data(values=[0, 1, 2, 3, 4, 10], bins=5)
    assert chart == {"kind": "histogram", "edges": [0.0, 2.0, 4.0, 6.0, 8.0, 10], "counts": [2, 2, 1, 0, 1]}


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**20), 10**20), min_size=1),
    st.integers(1, 50),
)
def test_histogram_keeps_all_values_or_says_that_it_cannot(values: list[float], bins: int) -> None:
    try:
        chart = chart_data(values=values, bins=bins)
    except ValueError:  # of another magnitude than one chart can show
        spread = max(values) - min(values)
        assert spread > 1e307 or spread < 1e-300 or spread <= 1e-12 * max(map(abs, values))
        return
    assert sum(chart["counts"]) == len(values)
    assert (len(chart["edges"]), len(chart["counts"])) == (bins + 1, bins)
    assert chart["edges"] == sorted(chart["edges"])
    json.dumps(chart, allow_nan=False)


@pytest.mark.parametrize("value", [0, 5, -3.5, 1e300])
def test_histogram_of_one_value_has_room_around_it(value: float) -> None:
    chart = chart_data(values=[value, value], bins=2)
    assert chart["edges"][0] < value < chart["edges"][-1]
    assert sum(chart["counts"]) == 2


def test_series_have_a_gap_where_they_have_no_point() -> None:
    rows = [
        {"day": "mon", "site": "a", "n": 1},
        {"day": "mon", "site": "a", "n": 2},
        {"day": "tue", "site": "b", "n": 5},
    ]
    assert chart_data(rows=rows, x="day", y="n", series="site") == {
        "kind": "series",
        "x": ["mon", "tue"],
        "series": [{"name": "a", "y": [3.0, None]}, {"name": "b", "y": [None, 5.0]}],
    }
    assert chart_data(rows=rows, x="day", y="n", combine="mean")["series"] == [{"name": "n", "y": [1.5, 5.0]}]
    assert chart_data(rows=rows, x="day", y="n", combine="count")["series"] == [{"name": "n", "y": [2, 1]}]


ROW = {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "give either values"),
        ({"values": [1], "rows": [ROW]}, "give either values"),
        ({"values": []}, "at least one number"),
        ({"values": [1, True]}, r"values\[1\] is not a number"),
        ({"values": ["1"]}, r"values\[0\] is not a number"),
        ({"values": [float("nan")]}, "not a finite number"),
        ({"values": [10**400]}, "not a finite number"),
        ({"values": [1], "bins": 0}, "bins must be"),
        ({"values": [-1.7e308, 1.7e308]}, "values lie too"),
        ({"values": [1e16, 1e16 + 2], "bins": 1000}, "values lie too"),
        ({"rows": [], "x": "x", "y": "y"}, "at least one object"),
        ({"rows": [ROW]}, "rows need x and y"),
        ({"rows": [ROW], "x": "x", "y": "z"}, r"rows\[0\] has no 'z'"),
        ({"rows": [3], "x": "x", "y": "y"}, r"rows\[0\] has no 'x'"),
        ({"rows": [{"x": [], "y": 2}], "x": "x", "y": "y"}, "must be texts or numbers"),
        ({"rows": [{"x": 1, "y": "2"}], "x": "x", "y": "y"}, r"rows\[0\].y is not a number"),
        ({"rows": [ROW], "x": "x", "y": "y", "combine": "median"}, "combine must be one of sum, mean"),
        ({"rows": [{"x": 1, "y": 1e308}] * 9, "x": "x", "y": "y"}, "beyond what a number can hold"),
    ],
)
def test_chart_data_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chart_data(**arguments)


# --- date_math
@pytest.mark.parametrize(
    ("arguments", "day"),
    [
        ({"start": "2024-02-28", "days": 2}, "2024-03-01"),
        ({"start": "2024-01-31", "months": 1}, "2024-02-29"),
        ({"start": "2024-01-31", "months": -2}, "2023-11-30"),
        ({"start": "2024-02-29", "months": 12, "days": 1}, "2025-03-01"),
        ({"start": "2024-05-31", "business_days": 1}, "2024-06-03"),
        ({"start": "2024-06-03", "business_days": -1}, "2024-05-31"),
        ({"start": "2024-12-24", "business_days": 1, "holidays": ["2024-12-25", "2024-12-26"]}, "2024-12-27"),
        ({"start": "2024-06-01"}, "2024-06-01"),
    ],
)
def test_date_math_adds(arguments: dict[str, Any], day: str) -> None:
    assert date_math(**arguments)["date"] == day


def test_date_math_names_the_weekday() -> None:
    assert date_math("2024-02-29", days=1) == {"date": "2024-03-01", "weekday": "Friday"}


def test_date_math_counts_between_two_dates() -> None:
    assert date_math("2024-05-31", "2024-06-10") == {"days": 10, "weeks": 1.43, "business_days": 6}
    assert date_math("2024-06-10", "2024-05-31") == {"days": -10, "weeks": -1.43, "business_days": -6}
    assert (
        date_math("2024-05-31", "2024-06-10", holidays=["2024-06-05", "2024-06-08", "2024-05-31"])["business_days"] == 5
    )
    assert date_math("0001-01-01", "9999-12-31")["days"] == 3_652_058


DAYS = st.dates(date(2000, 1, 1), date(2030, 1, 1))


@given(DAYS, st.integers(-300, 300), st.lists(DAYS, max_size=20))
def test_business_days_that_were_added_are_counted_between(start: date, count: int, holidays: list[date]) -> None:
    off = [day.isoformat() for day in holidays]
    end = date_math(start.isoformat(), business_days=count, holidays=off)["date"]
    assert date_math(start.isoformat(), end, holidays=off)["business_days"] == count


@given(DAYS, st.integers(-500, 500))
def test_business_days_between_are_those_of_the_calendar(start: date, days: int) -> None:
    sign = 1 if days >= 0 else -1
    passed = [start + timedelta(days=sign * step) for step in range(1, abs(days) + 1)]
    expected = sign * sum(day.weekday() < 5 for day in passed)
    end = start + timedelta(days=days)
    assert date_math(start.isoformat(), end.isoformat())["business_days"] == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"start": "2024-02-30"}, "start must be a date such as 2024-02-29; it is '2024-02-30'"),
        ({"start": "20240229"}, "start must be a date"),
        ({"start": 3}, "start must be a date"),
        ({"start": "2024-01-01", "end": "soon"}, "end must be a date"),
        ({"start": "2024-01-01", "holidays": ["x"]}, r"holidays\[0\] must be a date"),
        ({"start": "2024-01-01", "holidays": "2024-01-01"}, "holidays must be a list"),
        ({"start": "2024-01-01", "days": 1.5}, "days must be a whole number"),
        ({"start": "2024-01-01", "months": True}, "months must be a whole number"),
        ({"start": "2024-01-01", "business_days": 10**9}, "business_days must be"),
        ({"start": "2024-01-01", "end": "2024-01-02", "days": 1}, "not both"),
        ({"start": "9999-12-31", "days": 1}, "outside the years"),
        ({"start": "9999-12-31", "months": 1}, "outside the years"),
        ({"start": "0001-01-01", "business_days": -1}, "outside the years"),
    ],
)
def test_date_math_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        date_math(**arguments)


# --- the plugin's tool, and the one that sees the host
def test_price_quote_adds_up_in_the_currency_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert price_quote({"anvil": 2, "magnet": 1}) == {
        "currency": "EUR",
        "lines": {"anvil": "178.00", "magnet": "14.95"},
        "total": "192.95",
    }
    assert price_quote({"anvil": 1}, "USD")["total"] == "96.12"
    monkeypatch.setenv("REPORT_CURRENCY", "CHF")
    assert price_quote({"anvil": 1})["currency"] == "CHF"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"items": {}}, "at least one article"),
        ({"items": {"piano": 1}}, "no article 'piano'; there are anvil, rocket, magnet"),
        ({"items": {"anvil": 0}}, "the count of anvil"),
        ({"items": {"anvil": True}}, "the count of anvil"),
        ({"items": {"anvil": 1}, "currency": "XXX"}, "no prices in 'XXX'; there are in EUR, USD, CHF"),
    ],
)
def test_price_quote_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        price_quote(**arguments)


def test_host_disk_tells_shares_of_the_disk(tmp_path: Path) -> None:
    shares = host_disk(str(tmp_path))
    assert shares["total"] > 0
    assert 0 <= shares["used_percent"] <= 100


@pytest.mark.parametrize("path", ["relative", "", 3, "/a\0b"])
def test_host_disk_refuses_what_is_no_path(path: object) -> None:
    with pytest.raises(ValueError, match="path must be an absolute path"):
        host_disk(path)


def test_host_disk_names_a_path_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="/no/such/place: No such file"):
        host_disk("/no/such/place")
