"""Handles what the output folder holds from an earlier `prepare`: a finished store, unfinished parts, or other
files."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson

from terakoya.atomic_files import LOCK, dump_hashed_json, load_hashed_json, write_atomically
from terakoya.errors import UserError
from terakoya.store.document_sizes import FILE as SIZES_FILE
from terakoya.store.recorded_options import SHARD_BLOCKS
from terakoya.store.token_store import CHECKSUMS, DATA_FILES, PARTS, StoreFacts, TokenStore, read_facts

logger = logging.getLogger("terakoya")

_SIGNS = ("store.json", *DATA_FILES, PARTS)
"""What only a store has, finished or not."""
_OWN = ("store.json", "plans", "tokenizer", "rejects.jsonl", SIZES_FILE, CHECKSUMS, *DATA_FILES, PARTS)
"""What is removed with a store, in this order: without store.json there is no store, and while anything is left, one of
`_SIGNS` is, so that the next removal goes on."""


def read_finished(out: Path, inputs: Mapping[str, str], options: Mapping[str, object]) -> StoreFacts | None:
    """Returns the facts of the finished store in `out`, None if there is none yet. Raises UserError if the store was
    made from other input or is damaged, or if `out` holds other files."""
    if (out / "store.json").exists():
        facts = read_facts(out)
        _check_inputs(out, "holds a finished store", facts.inputs, facts.options, inputs, options)
        try:
            TokenStore.open(out)
        except UserError as error:
            raise UserError(f"{error} with --force") from error
        shutil.rmtree(out / PARTS, ignore_errors=True)
        logger.info("%s is finished already: same corpus, tokenizer and options; nothing to do", out)
        return facts
    if not (out / PARTS).exists() and (others := sorted(f.name for f in out.iterdir() if f.name != LOCK)):
        raise UserError(f"{out}: expected a new or empty folder, got one that holds {', '.join(others[:5])}")
    return None


def record_inputs(out: Path, inputs: Mapping[str, str], options: Mapping[str, object]) -> None:
    """Records what the parts are made from. Raises UserError if `out` holds parts of other input, or of input that no
    record names; a record without a part, as a corpus without a document leaves it, keeps nothing and is replaced."""
    record = out / PARTS / "inputs.json"
    if any(file != record for file in record.parent.glob("[!.]*")):  # the names of drafts begin with a dot
        recorded = _read_inputs(record)
        _check_inputs(out, "holds an unfinished store", recorded["inputs"], recorded["options"], inputs, options)
        logger.info("%s: continuing an interrupted preparation", out)
        return
    (out / PARTS).mkdir(exist_ok=True)
    with write_atomically(record) as stream:
        stream.write(dump_hashed_json({"inputs": inputs, "options": options}))


def _read_inputs(record: Path) -> Mapping[str, Mapping[str, str]]:
    try:
        return load_hashed_json(record.read_bytes())
    except (FileNotFoundError, ValueError) as raised:
        error = raised if isinstance(raised, ValueError) else "expected it beside the parts, found none"
        raise UserError(
            f"{record}: {error}: what the parts were made from is not known; start again with --force"
        ) from None


def is_from(parts: Path, inputs: Mapping[str, str]) -> bool:
    """Returns whether the folder of parts records that they are made from `inputs`."""
    try:
        return bool(load_hashed_json((parts / "inputs.json").read_bytes())["inputs"] == inputs)
    except (FileNotFoundError, ValueError):
        return False


def _check_inputs(
    out: Path,
    what: str,
    old_inputs: Mapping[str, str],
    old_options: Mapping[str, object],
    inputs: Mapping[str, str],
    options: Mapping[str, object],
) -> None:
    if old_inputs == dict(inputs):
        return
    changed = [key for key in {**old_inputs, **inputs} if old_inputs.get(key) != inputs.get(key)]
    if _tokenizer_type(old_options) != _tokenizer_type(options):  # two types of tokenizer have no inputs in common
        changed = list(dict.fromkeys("tokenizer" if key.startswith("tokenizer ") else key for key in changed))
    details = list(describe_changes(old_options, options))
    raise UserError(
        f"{out}: {what} made from other input; changed: {', '.join(changed)}"
        + (f" ({'; '.join(details)})" if details else "")
        + ". Choose another --out, or replace it with --force"
    )


def describe_changes(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    """Yields a line for each difference between the options of two stores: for settings of the same type the values
    that differ, for different types the types."""
    for name in {**old, **new}:
        consequence = name.startswith("clean: ") and old.get("clean") != new.get("clean")
        if name != SHARD_BLOCKS and not consequence:
            yield from _describe_change(name, _parse_settings(old.get(name)), _parse_settings(new.get(name)))


def _tokenizer_type(options: Mapping[str, object]) -> str:
    return str(options.get("tokenizer")).partition(" ")[0]


def _parse_settings(value: object) -> object:
    """Returns a recorded option; settings, which are recorded as `TYPE {JSON}` or as JSON, as a JSON object."""
    type_name, brace, rest = value.partition("{") if isinstance(value, str) else ("", "", "")
    try:
        settings = orjson.loads(brace + rest) if brace else None
    except orjson.JSONDecodeError:
        return value
    return value if settings is None else {"type": type_name.strip(), **settings} if type_name else settings


def _describe_change(name: str, old: object, new: object) -> Iterator[str]:
    if old == new:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.get("type") == new.get("type"):
        for key in {**old, **new}:
            yield from _describe_change(f"{name}.{key}", old.get(key), new.get(key))
    elif isinstance(old, list) and isinstance(new, list) and _types(old) == _types(new) != []:
        for number, (old_value, new_value) in enumerate(zip(old, new, strict=True)):
            yield from _describe_change(f"{name}.{number}", old_value, new_value)
    else:
        yield f"{name}: was {_shorten(old)}, is now {_shorten(new)}"


def _types(values: list[object]) -> list[str]:
    """Returns the types of a list of settings, an empty list if it is a list of other values."""
    types = [value["type"] for value in values if isinstance(value, Mapping) and "type" in value]
    return types if len(types) == len(values) else []


def _shorten(value: object) -> str:
    if isinstance(value, Mapping):
        return str(value["type"]) if "type" in value else _shorten(value.get("steps", "other settings"))
    if isinstance(value, list) and (types := _types(value)):
        return " + ".join(types)
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def remove_other_store(out: Path, inputs: Mapping[str, str]) -> None:
    """Removes the store or the parts in `out`, except unfinished parts with these `inputs`. Leaves a folder that holds
    neither as it is."""
    if not any((out / name).exists() for name in _SIGNS):
        return
    if not (out / "store.json").exists() and is_from(out / PARTS, inputs):
        return
    for name in _OWN:
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
            logger.info("--force: removed %s", path)
