"""A tool that tells what is in a CSV text: each column's type, how much of it is missing, and its range."""

from __future__ import annotations

import csv
import io
from typing import Any

from columns import summarize_column  # a sibling of this file: its directory is what the tool brings along

MAX_COLUMNS = 500


def csv_summary(text: str, delimiter: str = ",") -> dict[str, Any]:
    """Summarize CSV whose first line names the columns.

    Returns ``{"rows": n, "columns": {name: {...}}}``. Raises ``ValueError`` for what is no such CSV, with the line.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError("text must be CSV with the names of its columns on the first line; it is empty")
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
        raise ValueError("delimiter must be one character, such as ',' or ';'")
    reader = csv.reader(io.StringIO(text.lstrip("\ufeff"), newline=""), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(reader)]
        _check_header(header)
        cells: list[list[str]] = [[] for _ in header]
        rows = 0
        for row in reader:
            if not row:  # an empty line
                continue
            if len(row) != len(header):
                raise ValueError(f"line {reader.line_num} has {len(row)} fields, the first line has {len(header)}")
            rows += 1
            for index, cell in enumerate(row):
                cells[index].append(cell.strip())
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} is not CSV: {error}") from None
    return {"rows": rows, "columns": {name: summarize_column(cells[index]) for index, name in enumerate(header)}}


def _check_header(header: list[str]) -> None:
    if len(header) > MAX_COLUMNS:
        raise ValueError(f"the first line names {len(header)} columns; at most {MAX_COLUMNS} are summarized")
    for index, name in enumerate(header):
        if not name:
            raise ValueError(f"column {index + 1} has no name on the first line")
        if name in header[:index]:
            raise ValueError(f"two columns are called {name!r}")
