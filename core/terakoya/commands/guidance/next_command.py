"""The line that names the next command, printed on standard error when a command has made something."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from terakoya.store.token_store import StoreFacts

SENTENCES = {True: "東京は日本の[MASK]です。", False: "日本の首都は"}
"""The text that tries a model: for one that has [MASK], and for one that continues text."""

SMALL_STORE, LARGE_STORE = 50_000_000, 1_000_000_000
"""Tokens below which the tiny preset is named, and from which the one of base size is."""

_VALIDATION_ENDINGS = (".val", ".validation", "-val", "_val")


def show(*words: str | Path) -> None:
    """Prints `next: terakoya WORDS`, quoted for a shell. It goes to standard error, which no program parses."""
    from terakoya.log import error_console

    command = shlex.join(["terakoya", *map(str, words)])
    error_console().print(f"next: {command}", markup=False, soft_wrap=True)


def after_tokenizer(out: Path, corpus: Iterable[object], *, field: str = "text", documents: str = "blank") -> None:
    """Names `prepare` of the same corpus with the new tokenizer `out`."""
    options = [
        *(["--field", field] if field != "text" else []),
        *(["--documents", documents] if documents != "blank" else []),
    ]
    files = [str(each) for each in corpus] or ["CORPUS"]
    show("prepare", *files, "--tokenizer", out, "--out", out.with_name("store"), *options)


def after_store(out: Path, facts: StoreFacts) -> None:
    """Names `train` on the new store `out`, with a preset that fits its tokenizer and its size."""
    ending = next((each for each in _VALIDATION_ENDINGS if out.name.endswith(each)), "")
    beside = [out.with_name(out.name + each) for each in _VALIDATION_ENDINGS]
    store = out.with_name(out.name.removesuffix(ending)) if ending else out
    validation = out if ending else next((each for each in beside if each.is_dir()), None)
    words: list[str] = ["train", "tiny_instruction" if facts.answers else preset_for(facts)]
    words += ["--out", str(out.with_name("run"))]
    if facts.answers:
        words += ["--set", "start_from=MODEL"]
    if (store, validation) != (Path("work/store"), Path("work/store.val")):
        words += ["--set", f'data.train=["{store}"]', "--set"]
        words += (
            ["data.split=[98,2]", "--set", "data.validation=[]"]
            if validation is None
            else [f'data.validation=["{validation}"]']
        )
    show(*words)


def preset_for(facts: StoreFacts) -> str:
    """Returns the preset to begin with on a store: a BERT if its tokenizer has [MASK], else a GPT-2."""
    sizes = ("tiny_bert", "bert_small", "bert_base")
    if facts.vocabulary.mask is None:
        sizes = ("tiny_gpt2", "gpt2_125m", "gpt2_300m")
    return sizes[(facts.tokens >= SMALL_STORE) + (facts.tokens >= LARGE_STORE)]


def after_model(out: Path) -> None:
    """Names `try` of the exported model in `out`, with a text that fits its kind."""
    masked = any((folder / "config.json").is_file() and _is_masked(folder) for folder in (out, out / "discriminator"))
    show("try", out, SENTENCES[masked or (out / "generator").is_dir()])


def _is_masked(folder: Path) -> bool:
    import json

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return not any("CausalLM" in each or "LMHeadModel" in each for each in config.get("architectures") or ())
