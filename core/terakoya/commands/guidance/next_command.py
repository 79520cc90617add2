"""The line that names the next command, printed on standard error when a command has made something."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.commands.guidance.run_plugins import plugin_words
from terakoya.errors import UserError
from terakoya.log import error_console
from terakoya.places import HERE, Place, as_written

if TYPE_CHECKING:
    from terakoya.store.token_store import StoreFacts

SENTENCES = {
    "masked": ("東京は日本の[MASK]です。", "London is the [MASK] of England."),
    "spans": ("東京は日本の<extra_id_0>です。", "London is the <extra_id_0> of England."),
    "replaced": ("東京は日本の首都です。", "London is the capital of England."),
    "text": ("日本の首都は", "The capital of England is"),
}
"""The texts that try a model, with a Japanese vocabulary and with another: for one that has [MASK], one that fills in
spans, one that detects replaced tokens, and one that continues text."""

SMALL_STORE, LARGE_STORE = 50_000_000, 1_000_000_000
"""Tokens below which the smallest preset is named, and from which the largest is."""

SMALL_SPLIT = 50
"""Documents of which 2 % are at most one."""

_GIVEN: ContextVar[Sequence[tuple[str, str]]] = ContextVar("_GIVEN", default=())
_VERBS: ContextVar[Collection[str] | None] = ContextVar("_VERBS", default=None)

_VALIDATION_ENDINGS = (".val", ".validation", "-val", "_val")


@contextmanager
def carrying(options: Sequence[tuple[str, str]], verbs: Collection[str]) -> Iterator[None]:
    """While the block runs, every next command has these `options` of terakoya itself, such as ("--plugin", "f.py"),
    and begins with one of `verbs`: others are not shown."""
    given, known = _GIVEN.set(options), _VERBS.set(verbs)
    try:
        yield
    finally:
        _GIVEN.reset(given)
        _VERBS.reset(known)


def show(*words: str | Path) -> None:
    """Prints `next: terakoya WORDS`, quoted for a shell, unless its verb is of a plugin that is not there. It goes to
    standard error, which no program parses."""
    verbs, rest = _VERBS.get(), list(map(str, words))
    while rest[0].startswith("--"):  # such as --plugin FILE
        del rest[: 1 if "=" in rest[0] else 2]
    if verbs is None or rest[0] in verbs:
        error_console().print(line(*words), markup=False, soft_wrap=True)


def line(*words: str | Path) -> str:
    """Returns the line `next: terakoya WORDS`, quoted for a shell, for a message that ends with it. Options of terakoya
    itself that this command was given, and WORDS do not name, come first: the next command needs its plugins too."""
    texts = [as_written(word) for word in words]
    given = [
        word
        for option, value in _GIVEN.get()
        if value not in texts and f"{option}={value}" not in texts
        for word in (option, value)
    ]
    return f"next: {shlex.join(['terakoya', *given, *texts])}"


def reading_words(options: Any, plan: Path | None = None) -> list[str]:
    """Returns the options with which another command reads the corpus as the one with `options` did, and cleans it, if
    that did, by the `plan` in this folder."""
    from terakoya.commands.shared_options import reading
    from terakoya.corpus.corpus import Corpus

    clean = getattr(options, "clean", None)
    values = {**reading(options), "clean": clean, "clean_folder": None if clean is None else plan}
    defaults = {each.name: each.default for each in fields(Corpus)}
    given = [(name, value) for name, value in values.items() if value != defaults.get(name)]
    return [word for name, value in given for word in (f"--{name.replace('_', '-')}", str(value))]


def after_tokenizer(out: Path, corpus: Iterable[object], options: Iterable[str] = ()) -> None:
    """Names `prepare` of the same corpus, with the `options` that read it in the same way, and the new tokenizer
    `out`."""
    files = [str(each) for each in corpus] or ["CORPUS"]
    show("prepare", *files, "--tokenizer", out, "--out", free_name(out.with_name("store")), *options)


def after_store(out: Path, facts: StoreFacts, *, validation: Path | None = None) -> None:
    """Names `train` on the store `out`, with a preset that fits its tokenizer and its size; `validation` is the store
    to validate on, by default the one next to `out` that is named for it."""
    ending = next((each for each in _VALIDATION_ENDINGS if out.name.endswith(each)), "")
    neighbours = [out.with_name(out.name + each) for each in _VALIDATION_ENDINGS]
    store = out.with_name(out.name.removesuffix(ending)) if ending else out
    if validation is None:
        validation = out if ending else next((each for each in neighbours if each.is_dir()), None)
    else:
        store = out
    words: list[str] = ["train", "tiny_instruction" if facts.learned else preset_for(facts)]
    words += ["--out", str(free_name(out.with_name("run")))]
    if facts.learned:
        words += ["--set", "start_from=MODEL"]
    elif facts.vocabulary.mask is not None and not facts.word_starts:  # the presets of a BERT mask whole words
        words += ["--set", "objective.whole_word_mask=false"]
    if (store, validation) != (Path("work/store"), Path("work/store.val")):
        words += ["--set", f'data.train=["{store}"]', "--set"]
        words += _own_validation(facts.documents) if validation is None else [f'data.validation=["{validation}"]']
    show(*words)


def _own_validation(documents: int) -> list[str]:
    """Returns the settings that validate on the last documents of a store: 2 % of its `documents`, at least one; on
    none of a store of one document, which training needs."""
    if documents < 2:
        return ["data.validation=[]", "--set", "evaluation=null"]
    shares = "98,2" if documents > SMALL_SPLIT else f"{documents - 1},1"
    return [f"data.split=[{shares}]", "--set", "data.validation=[]"]


def preset_for(facts: StoreFacts) -> str:
    """Returns the preset to begin with on a store, of the recipes that `init` writes: an encoder if its tokenizer has
    [MASK], a T5 if it is one of T5's, with sentinels and without a token that begins a document, else a decoder."""
    sizes = ("tiny_modernbert", "bert_ja_small", "bert_ja")
    if facts.vocabulary.mask is None:
        sizes = ("gpt_ja_small", "gpt_ja", "gpt_ja")
        if facts.vocabulary.sentinels and facts.vocabulary.cls is None and facts.vocabulary.bos is None:
            sizes = ("tiny_t5", "tiny_t5", "t5_base")
    return sizes[(facts.tokens >= SMALL_STORE) + (facts.tokens >= LARGE_STORE)]


def after_model(out: Path) -> None:
    """Names `try` of the exported model in `out`, with a text that fits its kind and its vocabulary."""
    folders = [folder for folder in (out, out / "discriminator") if (folder / "config.json").is_file()]
    kind = "masked" if (out / "generator").is_dir() else _kind(folders[0]) if folders else "text"
    japanese, other = SENTENCES[kind]
    show("try", out, japanese if not folders or _is_japanese(folders[0]) else other)


def _is_japanese(folder: Path) -> bool:
    """Returns whether the vocabulary in `folder` is Japanese, or is none that can be read."""
    from terakoya.tokenization.languages import guess_languages
    from terakoya.tokenization.recognise import recognise_tokenizer

    try:
        return guess_languages(recognise_tokenizer(folder).load(folder)) == ["ja"]
    except UserError:
        return True


def upload_words(model: Path, *options: str | Path) -> tuple[str | Path, ...]:
    """Returns the words of an `upload` of `model` that pushes nothing, with more `options`, and with the checkpoint
    that it is from, for the card, if its run is next to it."""
    from terakoya.toolkit.formats.folder_digests import find_checkpoint

    name = f"ORGANISATION/{model.resolve().name}"
    folders = (model, model / "discriminator")
    origin = next((found for each in folders if (found := find_checkpoint(each, model.parent))), None)
    run = ("--run", origin) if origin is not None else ()
    return ("upload", model, "--name", name, *run, *options, "--dry-run", model.with_name("upload"))


def export_words(run: Path) -> tuple[str | Path, ...]:
    """Returns the words of an `export` of a run or a checkpoint to a new folder next to the run, with its plugins."""
    folder = run if run.parent.name != "checkpoints" else run.parent.parent
    return (*plugin_words(run), "export", run, "--out", free_name(folder.with_name("model")))


def free_name(folder: Path) -> Path:
    """Returns `folder`, or where it exists the first of `folder-2`, `folder-3`, ... that does not."""
    names = (folder.name, *(f"{folder.name}-{number}" for number in range(2, 100)))
    return next((free for name in names if not (free := folder.with_name(name)).exists()), folder)


def after_training(run: Path, place: Place = HERE) -> None:
    """Names what follows a finished run: its `export`, or `try` if the model next to it is from its last checkpoint.
    `place` is where the run is kept."""
    if not place.is_local:
        show("export", place.name, "--out", free_name(Path("model")))
        return
    from terakoya.runs.checkpoints import list_checkpoints
    from terakoya.toolkit.formats.folder_digests import find_checkpoint

    model = run.with_name("model")
    exported = [find_checkpoint(each, model.parent) for each in (model, model / "discriminator")]
    last = [folder for _, folder in list_checkpoints(run / "checkpoints")[-1:]]
    if last and any(each is not None and each.resolve() == last[0].resolve() for each in exported):
        after_model(model)
    else:
        show(*export_words(run))


def after_run(run: Path, *, shown: bool = False) -> None:
    """Names what follows from the state of a run: `export` of a finished one, what continues one that has stopped,
    for one that trains the page that follows it, or its status if that page is what was `shown`, and for one whose
    checkpoints are gone its report."""
    from terakoya.runs import status

    state = status.read(run)
    if state.problems:
        show("verify", run)
    elif state.checkpoints_gone and state.state not in ("training", "starting"):  # nothing to export or to continue
        show("status", run) if shown else show("report", run, "--out", free_name(run.with_name("report.html")))
    elif state.state == "finished":
        after_training(run)
    elif state.state in ("training", "starting"):
        show("status", run, "--watch") if shown or state.state == "starting" else show("report", run, "--live")
    elif words := train_words(run):
        show(*words)
    else:
        text = f"next: the command that started {run} continues it"
        error_console().print(text, markup=False, soft_wrap=True)


def train_words(run: Path) -> tuple[str | Path, ...]:
    """Returns the words of the `train` that continues `run` on this machine, with its plugins; () if it was on several
    nodes or its parameters are not there."""
    from terakoya.runs import files, metrics

    parameters = files.read_parameters(run)
    batch_size = parameters.get("batch_size", {})
    if not parameters or not isinstance(batch_size, dict) or len(batch_size) > 1:
        return ()
    manifests = [files.read_manifest(each.folder) for each in files.find_checkpoints(run)]
    starts = [*manifests, *metrics.read(run).of_kind("start")]
    worlds = [record["world"] for record in starts if isinstance(record.get("world"), dict)]
    processes = worlds[-1].get("processes", 1) if worlds else 1
    given = ("--processes", str(processes)) if processes > 1 else ()
    return (*plugin_words(run), "train", run / "parameters.json", "--out", run, *given)


def _kind(folder: Path) -> str:
    """Returns the key of `SENTENCES` for the model in `folder`."""
    import json

    from terakoya.inference.loading import find_model, is_causal

    if find_model(folder)[1]:
        return "replaced"
    if is_causal(folder):
        return "text"
    classes = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ()
    return "spans" if any("ConditionalGeneration" in each for each in classes) else "masked"
