"""What an earlier `prepare` left in a folder: a finished store, unfinished parts, or something else."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import orjson

from terakoya.data.parts import committed
from terakoya.data.store import PARTS, StoreFacts, TokenStore, read_facts
from terakoya.data.store_writer import LOCK
from terakoya.errors import UserError

logger = logging.getLogger("terakoya")

_OWN = ("store.json", PARTS, "tokens.bin", "tokens.idx", "tokens.words", "rejects.jsonl", "tokenizer", "plans")


def finished_facts(out: Path, inputs: Mapping[str, str], options: Mapping[str, object]) -> StoreFacts | None:
    """The facts of the finished store in `out`, None if there is none yet.

    Raises UserError if it was made from other input or is damaged, or if `out` holds other things.
    """
    if (out / "store.json").exists():
        facts = read_facts(out)
        _check_same(out, "holds a finished store", facts.inputs, facts.options, inputs, options)
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


def begin(out: Path, inputs: Mapping[str, str], options: Mapping[str, object]) -> None:
    """Notes what the parts are made from. UserError if there are parts of something else."""
    record = out / PARTS / "inputs.json"
    if record.exists():
        then = orjson.loads(record.read_bytes())
        _check_same(out, "holds an unfinished store", then["inputs"], then["options"], inputs, options)
        logger.info("%s: continuing what was interrupted", out)
        return
    (out / PARTS).mkdir(exist_ok=True)
    with committed(record) as stream:
        stream.write(orjson.dumps({"inputs": inputs, "options": options}))


def _check_same(
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
    details = [
        f"{key}: {options_then.get(key)!r} then, {value!r} now"
        for key, value in options.items()
        if options_then.get(key) != value
    ]
    raise UserError(
        f"{out}: {what} made from other input; changed: {', '.join(changed)}"
        + (f" ({'; '.join(details)})" if details else "")
        + ". Choose another --out, or throw it away with --force"
    )


def clear(out: Path, inputs: Mapping[str, str]) -> None:
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
