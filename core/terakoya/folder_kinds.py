"""Says what is at a path that was given in the place of something else, and what to do with it.

Every folder that terakoya makes or reads has files by which it is known: a run, a checkpoint, a token store, a
Transformers model, a tokenizer.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from terakoya.errors import UserError
from terakoya.places import advise_local, is_local

Kind = Literal["run", "checkpoint", "token store", "Transformers model", "tokenizer", "corpus"]

CORPUS_ENDINGS = (".jsonl", ".txt", ".csv", ".tsv", ".parquet", ".gz", ".zst", ".xz", ".bz2")
POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that Git LFS has in place of a large one."""
IS_POINTER = "is a pointer of Git LFS in place of the file; `git lfs pull` gets it, as does `hf download`"

_SIGNS: Mapping[Kind, Callable[[Path], bool]] = {
    "checkpoint": lambda path: (path / "manifest.json").is_file() and (path / "state").is_dir(),
    "run": lambda path: (path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file(),
    "token store": lambda path: (path / "store.json").is_file(),
    "Transformers model": lambda path: any(
        (path / name / "config.json").is_file() for name in ("", "generator", "discriminator")
    ),
    "tokenizer": lambda path: any(
        (path / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json", "vocab.txt", "tokenizer.model")
    ),
    "corpus": lambda path: any(
        each.name.lower().endswith(CORPUS_ENDINGS) for each in (path.iterdir() if path.is_dir() else (path,))
    ),
}

_ONE: Mapping[Kind, str] = {
    "checkpoint": "a checkpoint",
    "run": "a run",
    "token store": "a token store",
    "Transformers model": "a Transformers model",
    "tokenizer": "a tokenizer",
    "corpus": "a corpus",
}

_PREPARE = "make a token store with it: terakoya prepare CORPUS --tokenizer {path} --out STORE"
_EXPORT = "export a model from it: terakoya export {path} --out MODEL"
_ADVICE: Mapping[tuple[str, Kind], str] = {
    ("token store", "run"): "{path}/parameters.json names its stores",
    ("token store", "checkpoint"): "its manifest.json names its stores",
    ("token store", "tokenizer"): _PREPARE,
    ("token store", "Transformers model"): _PREPARE,
    ("token store", "corpus"): "make a token store of it: terakoya prepare {path} --tokenizer TOKENIZER --out STORE",
    ("tokenizer", "token store"): "its tokenizer is in {path}/tokenizer",
    ("tokenizer", "checkpoint"): "its tokenizer is in {path}/tokenizer",
    ("tokenizer", "run"): "the tokenizer is in each of {path}/checkpoints",
    ("tokenizer", "corpus"): "train one on it: terakoya tokenizer train {path} --type mecab_wordpiece --out TOKENIZER",
    ("run", "checkpoint"): "its run is two folders above it",
    ("run", "token store"): "`terakoya store info {path}` describes it",
    ("run", "tokenizer"): "`terakoya tokenizer report {path}` describes it",
    ("run", "Transformers model"): '`terakoya try {path} "text"` tries it',
    ("Transformers model", "run"): _EXPORT,
    ("Transformers model", "checkpoint"): _EXPORT,
    ("Transformers model", "token store"): "train a model on it first: terakoya train PARAMETERS.json --out RUN",
    ("Transformers model", "tokenizer"): "a model is trained first: terakoya train PARAMETERS.json --out RUN",
    ("corpus", "tokenizer"): "it is named after the text: terakoya prepare CORPUS --tokenizer {path} --out STORE",
    (
        "corpus",
        "Transformers model",
    ): "its tokenizer is named after the text: terakoya prepare CORPUS --tokenizer {path} --out STORE",
    ("corpus", "run"): "{path}/parameters.json names the stores of its text",
    ("parameter file", "corpus"): "make a token store of it: terakoya prepare {path} --tokenizer TOKENIZER --out STORE",
    (
        "parameter file",
        "token store",
    ): "name it in data.train of a parameter file, such as one of `terakoya parameters list`",
    ("parameter file", "tokenizer"): _PREPARE,
    ("parameter file", "Transformers model"): "name it in start_from of a parameter file",
    ("corpus", "token store"): "its text is tokenized already: name it in data.train of a parameter file",
}
"""(what was expected, what is there) -> what to do with it."""


def kind_of(path: Path) -> Kind | None:
    """Returns the kind of the file or folder `path`; None if it is none of the known ones."""
    if not path.exists():
        return None
    return next((kind for kind, has_signs in _SIGNS.items() if has_signs(path)), None)


def list_models(folder: Path) -> list[str]:
    """Returns the sub-folders of `folder` that contain a Transformers model; "" is the folder itself."""
    if (folder / "config.json").is_file():
        return [""]
    return sorted(each.name for each in folder.iterdir() if (each / "config.json").is_file())


def describe_found(path: Path, expected: str) -> str:
    """Returns what is at `path`, where `expected` (a kind) was to be, and what to do: the end of a message, such as
    `a run; export a model from it: terakoya export work/run --out MODEL`."""
    if not is_local(path):
        return f"an address; {advise_local(path)}"
    if not path.exists():
        return f"no such folder{_near(path)}"
    kind = kind_of(path)
    advice = _ADVICE.get((expected, kind)) if kind is not None else None
    if kind is None or (kind == "corpus" and advice is None):
        return (
            "a file" if not path.is_dir() else "a folder of other files" if any(path.iterdir()) else "an empty folder"
        )
    return _ONE[kind] + (f"; {_fill_in(advice, path)}" if advice else "")


def _fill_in(advice: str, path: Path) -> str:
    """Returns `advice` about `path`, which is quoted where it is part of a command."""
    return advice.format(path=shlex.quote(str(path)) if "terakoya " in advice else path)


def is_pointer(file: Path) -> bool:
    """Returns whether Git LFS has put `file` in the place of a large one."""
    if not len(POINTER) < file.stat().st_size < 1024:
        return False
    with file.open("rb") as stream:
        return stream.read(len(POINTER)) == POINTER


def refuse_pointers(files: Iterable[Path]) -> None:
    """Raises UserError for the first of `files` that is a pointer of Git LFS."""
    for file in files:
        if is_pointer(file):
            raise UserError(f"{file}: {IS_POINTER}")


def missing_file(path: Path) -> str:
    """Returns what is at `path`, where a JSON file was to be: the end of a message."""
    if path.is_dir():
        kind = kind_of(path)
        inside = path / "parameters.json"
        return (f"expected a file, got {_ONE[kind] if kind else 'a folder'}") + (
            f"; did you mean {inside}?" if inside.is_file() else ""
        )
    if not is_local(path):
        return f"expected a file, got an address; {advise_local(path)}"
    return f"no such file{_near(path)}"


def _near(path: Path) -> str:
    """Returns the names next to the missing `path` that are nearly its own, or says that its folder is missing."""
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}"
    near = nearest_paths(path)
    return " (did you mean " + " or ".join(near) + "?)" if near else ""


def nearest_paths(path: Path) -> list[str]:
    """Returns at most two paths next to the missing `path` that are nearly its own, the nearest first; none for what
    can be no path, and next to what cannot be read."""
    try:
        names = [each.name for each in path.parent.iterdir()] if is_local(path) and not path.exists() else []
    except (OSError, ValueError):
        return []
    return [str(path.parent / name) for name in difflib.get_close_matches(path.name, names, n=2, cutoff=0.7)]


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Returns the shortest tails of the paths that all differ."""
    paths = [Path(os.path.realpath(folder)).parts for folder in folders]  # not `resolve`: it raises for a loop of links
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(parts[-2:])} ({number})" for number, parts in enumerate(paths, start=1)]
