"""Which files of a folder an upload pushes: those of its models, and those that the user names. All others stay here.

A folder that `export` wrote says which files belong to it. In another one they are those that Transformers reads, and
what these name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.errors import UserError
from terakoya.folder_kinds import list_models
from terakoya.json_settings import leaves, looks_secret
from terakoya.toolkit.formats import folder_digests
from terakoya.toolkit.formats.model_files import SCORES
from terakoya.toolkit.tokenizers import mecab
from terakoya_hub.card_training import CHART
from terakoya_hub.model_card import CARD

READ_BY_TRANSFORMERS = (
    "config.json", "generation_config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "terakoya.json", folder_digests.NAME,
)  # fmt: skip
"""Files of a model and of its tokenizer, whose class may have further names; the last two are terakoya's."""
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files that name those of divided weights."""
MODULES = "modules.json"
"""The file of Sentence Transformers that names the folders of its steps."""
NAMING = ("config.json", "tokenizer_config.json", "terakoya.json", MODULES, *INDICES)
"""Files whose texts may be names of other files."""
MECAB_OPTION = "mecab_kwargs.mecab_option"
"""The key of tokenizer_config.json with MeCab's options."""
SCANNED_BYTES = 1 << 26
"""Larger files are not searched for secrets."""


@dataclass(frozen=True)
class Published:
    """What an upload pushes of a folder.

    Attributes:
        files: place in the repository -> file, sorted.
        left_out: what else lies in the folder; of a folder with several such files their number.
    """

    files: Mapping[str, Path]
    left_out: Sequence[str]


def choose_files(folder: Path, also: Sequence[Path] = ()) -> Published:
    """Returns the files of the models in `folder` and `also`, which keep their place below it; from elsewhere they are
    put at the top.

    Raises:
        UserError: a file is missing, is a link out of the folder, or holds what looks like a secret.
    """
    models = list_models(folder)
    top = {name: folder / name for name in (CARD, CHART)}
    files = {**top, **{_place(each, folder): each for sub in models for each in _files_of(folder / sub)}}
    files = {place: file for place, file in files.items() if file.is_file()}
    added = {_place(file, folder): file for file in also}
    for place, file in (files | added).items():
        _check_place(file, folder, given=place in added)
        _refuse_secrets(file, assigned=place in added)
    chosen = dict(sorted((files | added).items()))
    return Published(chosen, _left_out(folder, chosen))


def refuse_local_paths(model: Path) -> None:
    """Raises UserError where the tokenizer in the folder `model` reads files of this machine that are not in it."""
    file = model / "tokenizer_config.json"
    for key, value in leaves({name: each for name, each in _read_json(file).items() if name.endswith("_kwargs")}):
        text = value if isinstance(value, str) else ""
        files = mecab.named_files(text) if key == MECAB_OPTION else [text] if Path(text).is_absolute() else []
        inside = mecab.user_dictionaries(text) if key == MECAB_OPTION else []
        for name in files:
            if name not in inside or Path(name).is_absolute() or not (model / name).is_file():
                raise UserError(
                    f"{file}: {key} names {name}, which is not in the folder: nobody else could load the tokenizer. A "
                    "user dictionary of MeCab may lie in the folder and be named without it, "
                    '"mecab_option": "-u user.dic"; other dictionaries are those of packages, as with --dictionary '
                    "unidic_lite"
                )


def _files_of(model: Path) -> Iterator[Path]:
    """Yields the files that belong to the model in the folder `model`; some may not be there."""
    recorded = folder_digests.read(model)
    names = READ_BY_TRANSFORMERS if recorded is None else (*recorded, folder_digests.NAME)
    yield from (model / name for name in (*names, CARD, SCORES))
    if recorded is None:
        yield from (model / name for name in (MODULES, *INDICES, *_names_of_tokenizer_class(model)))
        for file in (model / name for name in NAMING):
            yield from _named_in(file)


def _names_of_tokenizer_class(model: Path) -> Iterator[str]:
    import transformers

    settings = _read_json(model / "tokenizer_config.json")
    name = settings.get("tokenizer_class") if isinstance(settings, Mapping) else None
    kind = getattr(transformers, str(name), None)
    yield from getattr(kind, "vocab_files_names", {}).values()


def _named_in(file: Path) -> Iterator[Path]:
    """Yields the files next to `file`, or below, that it names: shards, dictionaries, the model's own code with what
    that imports, and the files of a step of Sentence Transformers."""
    content = _read_json(file)
    texts = {key: value for key, value in leaves(content) if isinstance(value, str) and value}
    names = [*texts.values(), *mecab.user_dictionaries(texts.get(MECAB_OPTION, ""))]
    inside = [file.parent / name for name in names if not {"..", "/"} & set(Path(name).parts)]
    yield from (each for each in inside if each.is_file())
    if file.name == MODULES:
        yield from (each / name for each in inside for name in READ_BY_TRANSFORMERS if each != file.parent)
    for _, value in leaves(content.get("auto_map", {}) if isinstance(content, Mapping) else {}):
        code = file.parent / f"{str(value).partition('.')[0]}.py"  # with "--" in it, that of another repository
        if code.is_file():
            from transformers.dynamic_module_utils import get_relative_import_files

            yield from (code, *map(Path, get_relative_import_files(code)))


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}


def _place(file: Path, folder: Path) -> str:
    path, top = file.parent.resolve() / file.name, folder.resolve()
    return path.relative_to(top).as_posix() if path.is_relative_to(top) else path.name


def _check_place(file: Path, folder: Path, *, given: bool) -> None:
    """Raises UserError where `file` is none, or is or lies behind a link out of `folder`; a file that is `given` may be
    elsewhere itself."""
    if not file.is_file():
        raise UserError(f"--also {file}: expected a file, found none")
    there = file.resolve()
    above = file.parent.resolve() if given else folder.resolve()
    if not there.is_relative_to(above):
        raise UserError(
            f"{file}: is a link to {there}, outside the folder, and no link is followed out of it; put the file itself "
            "there"
        )


def _refuse_secrets(file: Path, *, assigned: bool) -> None:
    """Raises UserError for a text that holds what looks like a secret; where `assigned`, also a variable that is called
    so and set."""
    if file.suffix in folder_digests.WEIGHTS or file.stat().st_size > SCANNED_BYTES:
        return
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return
    for number, line in enumerate(lines, start=1):
        if looks_secret(line, assigned=assigned):
            raise UserError(
                f"{file}:{number}: looks like a secret, which everybody with the repository could read; remove it"
            )


def _left_out(folder: Path, chosen: Mapping[str, Path]) -> list[str]:
    found: dict[str, list[str]] = {}
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if Path(place, name).is_symlink()]
        for file in (Path(place, name).relative_to(folder) for name in (*names, *links)):
            if file.as_posix() not in chosen:
                found.setdefault(file.parts[0], []).append(file.as_posix())
    return [files[0] if len(files) == 1 else f"{top}/ ({len(files)} files)" for top, files in sorted(found.items())]
