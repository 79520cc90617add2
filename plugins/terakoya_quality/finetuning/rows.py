"""Reads files of labelled examples: a row for each line of jsonl, csv or tsv, each row of parquet, or each question of
SQuAD's JSON."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Never

from terakoya.corpus.files import COMPRESSIONS
from terakoya.corpus.known_keys import RefusedKeyError
from terakoya.corpus.parquet import whole_parquet
from terakoya.corpus.utf8_reader import open_text
from terakoya.errors import UserError, nearest
from terakoya.folder_kinds import missing_file, refuse_pointers
from terakoya.json_settings import short_json
from terakoya_quality.finetuning.known_keys import KNOWN

FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
IN_PLACE_OF = ((r"text[12]", "text"), (r"text|spans", "tokens"), (r"choice\d+", "choices"))
"""A task's name of a column -> the other column that tasks read in its place where a row has both."""


@dataclass(frozen=True)
class Row:
    """One example as its file has it.

    Attributes:
        place: the file and the line, for messages: `train.jsonl, line 3`.
        values: column -> value; text alone in csv and tsv.
        renamed: the file's own names of columns that are also here under those of a task.
    """

    place: str
    values: Mapping[str, Any]
    renamed: Collection[str] = ()

    @property
    def file(self) -> str:
        """The file of `place`."""
        return self.place.partition(", ")[0]

    def text(self, column: str) -> str:
        """Returns the text in `column`. Raises UserError if there is no such column, or no text in it."""
        value = self.value(column)
        if not isinstance(value, str):
            self.refuse(f"{column}: expected text, got {short_json(value)}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            self.refuse(f"{column}: contains half of a surrogate pair, which is no character; leave it out")
        return value

    def value(self, column: str) -> Any:
        """Returns what is in `column`. Raises UserError if there is no such column."""
        if column not in self.values:
            self.refuse(
                f'has no column "{column}"{nearest(column, self.values)}; name the one that is meant: '
                f"--column {column}=NAME"
            )
        return self.values[column]

    def unread(self, kind: str, part: str = "") -> list[str]:
        """Returns the columns that hold something and that no task reads, if the row is of this `kind` in `KNOWN`; with
        a column `part`, the keys of the objects in its list. Raises UserError for one that would change what is
        trained."""
        values = self.values.get(part) if part else [self.values]
        objects = [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []
        try:
            found = [key for each in objects for key in KNOWN[kind].unread(each)]
        except RefusedKeyError as error:
            self.refuse(f"{error}, which is not read; take the key out, or leave out the example")
        return [f"{part}[].{key}" if part else key for key in found if part or key not in self.renamed]

    def refuse(self, problem: str) -> Never:
        """Raises UserError that names the place."""
        raise UserError(f"{self.place}: {problem}")


def read_rows(
    file: Path, *, columns: Mapping[str, str] | None = None, header: Sequence[str] = (), limit: int | None = None
) -> list[Row]:
    """Returns the rows of `file`, by its ending: .jsonl, .json (an object a line, a list of objects, or SQuAD's), .csv,
    .tsv (without quotes, as GLUE is published), all of these also compressed, or .parquet.

    Args:
        columns: the name that a task has for a column -> the file's own. A column that the task would read in the
            place of one of them is left out, unless it is named as well.
        header: names of the columns of a csv or tsv file without a first line of names.
        limit: the largest number of rows; None: all.

    Raises:
        UserError: there is no such file, it is of another kind, damaged, or has no rows.
    """
    if not file.is_file():
        raise UserError(f"{file}: {missing_file(file)}")
    refuse_pointers([file])
    name = file.name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    ending = Path(name).suffix
    if ending not in FORMATS:
        raise UserError(f"{file}: expected a name that ends in {', '.join(FORMATS)} (also compressed), got {file.name}")
    if ending == ".parquet":
        read = _parquet_rows(file)
    else:
        text = _read_text(file)
        read = _json_rows(file, text) if ending in (".json", ".jsonl") else _table_rows(file, text, ending, header)
    rows: list[Row] = []
    for row in read:
        if limit is not None and len(rows) == limit:
            break
        rows.append(_rename_columns(row, columns or {}))
    if not rows:
        raise UserError(f"{file}: expected examples, found none: the file is empty")
    return rows


def divide_rows(rows: Sequence[Row], shares: Mapping[str, float]) -> dict[str, list[Row]]:
    """Returns set -> its rows. Which set has a row depends on the row alone, by a hash; `shares` add up to 1."""
    divided: dict[str, list[Row]] = {name: [] for name in shares}
    names, borders = list(shares), list(accumulate(shares.values()))
    for row in rows:
        content = json.dumps(row.values, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
        place = int.from_bytes(hashlib.sha256(content).digest()[:8]) / 2**64
        divided[names[min(bisect_right(borders, place), len(names) - 1)]].append(row)
    return divided


def _read_text(file: Path) -> str:
    try:
        with open_text(file) as stream:
            return stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: cannot be read: {error}; save it as UTF-8 text") from None


def _parquet_rows(file: Path) -> Iterator[Row]:
    with whole_parquet(file) as parquet:
        table = parquet.read()
    for number, values in enumerate(table.to_pylist(), 1):
        yield Row(f"{file}, row {number}", values)


def _rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Returns `row` with the columns that `columns` maps also under the names that the task has for them, and without
    those that the task would read in their place."""
    others = {other for name in columns for pattern, other in IN_PLACE_OF if re.fullmatch(pattern, name)}
    renamed = {name: value for name, value in row.values.items() if name not in others}
    for name, own in columns.items():
        if own not in row.values:
            row.refuse(f'has no column "{own}"{nearest(own, row.values)}')
        renamed[name] = row.values[own]
    return Row(row.place, renamed, set(columns.values()))


def _json_rows(file: Path, text: str) -> Iterator[Row]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) == 1 or (lines and lines[0][1].strip() in ("[", "{")):
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}: not valid JSON: {error}") from None
        if isinstance(whole, dict) and isinstance(whole.get("data"), list):
            yield from _squad_rows(file, whole["data"])
            return
        if isinstance(whole, list):
            for number, value in enumerate(whole, 1):
                yield _object_row(f"{file}, entry {number}", value)
            return
        if len(lines) > 1:
            raise UserError(f'{file}: expected an object a line, a list of objects, or an object with "data" as SQuAD')
    for number, line in lines:
        place = f"{file}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not valid JSON: {error}") from None
        yield _object_row(place, value)


def _object_row(place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{place}: expected an object with a key for each column, got {short_json(value)}")
    return Row(place, value)


def _squad_rows(file: Path, articles: Sequence[Any]) -> Iterator[Row]:
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    yield Row(f"{file}, question {asked.get('id', '')}", {**asked, "context": paragraph["context"]})
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: expected data[].paragraphs[].qas[] as SQuAD has it, stopped at {error}") from None


def _table_rows(file: Path, text: str, ending: str, header: Sequence[str]) -> Iterator[Row]:
    """Yields the rows of csv, or of tsv without quotes; the names of the columns are in the first line or `header`."""
    csv.field_size_limit(sys.maxsize)
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if ending == ".tsv" else {"strict": True}
    reader = csv.reader(io.StringIO(text, newline=""), **options)
    names = list(header)
    try:
        for cells in reader:
            if not cells:
                continue
            if not names:
                names = cells
                continue
            place = f"{file}, line {reader.line_num}"
            if len(cells) != len(names):
                raise UserError(f"{place}: expected {len(names)} columns ({', '.join(names)}), got {len(cells)}")
            yield Row(place, dict(zip(names, cells, strict=True)))
    except csv.Error as error:
        raise UserError(f"{file}, line {reader.line_num}: cannot be read: {error}") from None
