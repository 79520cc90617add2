"""What an earlier `prepare` left in a folder: a finished store, unfinished parts, or something else."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson

from terakoya.atomic_files import LOCK, committed
from terakoya.errors import UserError
from terakoya.store.recorded_options import SHARD_BLOCKS
from terakoya.store.token_store import PARTS, StoreFacts, TokenStore, read_facts

logger = logging.getLogger("terakoya")

_FILES = ("tokens.bin", "tokens.idx", "tokens.words", "tokens.answers", "rejects.jsonl")
_OWN = ("store.json", PARTS, *_FILES, "tokenizer", "plans")


def read_finished(out: Path, inputs: Mapping[str, str], options: Mapping[str, object]) -> StoreFacts | None:
    """The facts of the finished store in `out`, None if there is none yet.

    Raises UserError if it was made from other input or is damaged, or if `out` holds other things.
    """
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
    """Notes what the parts are made from. UserError if there are parts of something else."""
    record = out / PARTS / "inputs.json"
    if record.exists():
        then = orjson.loads(record.read_bytes())
        _check_inputs(out, "holds an unfinished store", then["inputs"], then["options"], inputs, options)
        logger.info("%s: continuing what was interrupted", out)
        return
    (out / PARTS).mkdir(exist_ok=True)
    with committed(record) as stream:
        stream.write(orjson.dumps({"inputs": inputs, "options": options}))


def _check_inputs(
    out: Path,
    what: str,
    inputs_then: Mapping[str, str],
    options_then: Mapping[str, object],
    inputs: Mapping[str, str],
    options: Mapping[str, object],
) -> None:
    if inputs_then == dict(inputs):
        return
    changed = [key for key in {**inputs_then, **inputs} if inputs_then.get(key) != inputs.get(key)]
    if _tokenizer_type(options_then) != _tokenizer_type(
        options
    ):  # then nothing of the one tokenizer is there in the other
        changed = list(dict.fromkeys("tokenizer" if key.startswith("tokenizer ") else key for key in changed))
    details = list(describe_changes(options_then, options))
    raise UserError(
        f"{out}: {what} made from other input; changed: {', '.join(changed)}"
        + (f" ({'; '.join(details)})" if details else "")
        + ". Choose another --out, or throw it away with --force"
    )


def describe_changes(then: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    """What differs between the options of two stores, a line each: of settings of one kind only those that differ, of
    different kinds the kinds."""
    for name in {**then, **now}:
        consequence = name.startswith("clean: ") and then.get("clean") != now.get("clean")
        if name != SHARD_BLOCKS and not consequence:
            yield from _describe_change(name, _parse_settings(then.get(name)), _parse_settings(now.get(name)))


def _tokenizer_type(options: Mapping[str, object]) -> str:
    return str(options.get("tokenizer")).partition(" ")[0]


def _parse_settings(value: object) -> object:
    """An option as recorded; settings, which are recorded as `KIND {JSON}` or JSON alone, as a JSON object again."""
    kind, brace, rest = value.partition("{") if isinstance(value, str) else ("", "", "")
    try:
        settings = orjson.loads(brace + rest) if brace else None
    except orjson.JSONDecodeError:
        return value
    return value if settings is None else {"type": kind.strip(), **settings} if kind else settings


def _describe_change(name: str, then: object, now: object) -> Iterator[str]:
    if then == now:
        return
    if isinstance(then, Mapping) and isinstance(now, Mapping) and then.get("type") == now.get("type"):
        for key in {**then, **now}:
            yield from _describe_change(f"{name}.{key}", then.get(key), now.get(key))
    elif isinstance(then, list) and isinstance(now, list) and _types(then) == _types(now) != []:
        for number, (each_then, each_now) in enumerate(zip(then, now, strict=True)):
            yield from _describe_change(f"{name}.{number}", each_then, each_now)
    else:
        yield f"{name}: {_shorten(then)} then, {_shorten(now)} now"


def _types(values: list[object]) -> list[str]:
    """The kinds of a list of settings, none if it is a list of something else."""
    kinds = [each["type"] for each in values if isinstance(each, Mapping) and "type" in each]
    return kinds if len(kinds) == len(values) else []


def _shorten(value: object) -> str:
    if isinstance(value, Mapping):
        return str(value["type"]) if "type" in value else _shorten(value.get("steps", "other settings"))
    if isinstance(value, list) and (kinds := _types(value)):
        return " + ".join(kinds)
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def remove_other_store(out: Path, inputs: Mapping[str, str]) -> None:
    """Removes what `out` holds of a store, except unfinished work of this very input."""
    record = out / PARTS / "inputs.json"
    finished = (out / "store.json").exists()
    if not finished and record.exists() and orjson.loads(record.read_bytes())["inputs"] == inputs:
        return
    for name in _OWN:  # store.json first: from then on there is no store
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
            logger.info("--force: removed %s", path)
