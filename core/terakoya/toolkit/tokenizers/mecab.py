"""MeCab's dictionaries, by name or folder, with errors that a user can fix. `terakoya_tokenizer` splits the words."""

from __future__ import annotations

import filecmp
import functools
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from terakoya.errors import UserError, nearest
from terakoya_tokenizer import mecab
from terakoya_tokenizer.mecab import DICTIONARIES as DICTIONARIES
from terakoya_tokenizer.mecab import MecabSplitter as MecabSplitter


def dictionary_folder(dictionary: str) -> Path:
    """Returns the folder of a dictionary, given by name or path. Raises UserError if it is missing."""
    if dictionary in DICTIONARIES:
        try:
            folder = mecab.dictionary_folder(dictionary)
        except ModuleNotFoundError as error:
            raise UserError(
                f"dictionary {dictionary}: not installed; run: pip install {dictionary.replace('_', '-')}"
            ) from error
        if not (folder / "sys.dic").is_file():
            raise UserError(f"dictionary {dictionary}: the package has no data; run: python -m {dictionary} download")
        return folder
    folder = Path(dictionary).expanduser()
    if (folder / "sys.dic").is_file():
        return folder.resolve()
    if "/" in dictionary or folder.exists():
        raise UserError(f"dictionary {dictionary}: expected a compiled MeCab dictionary, found no sys.dic in it")
    raise UserError(f'dictionary: expected a name or a folder, got "{dictionary}"{nearest(dictionary, DICTIONARIES)}')


def dictionary_options(dictionary: str, option: str = "") -> str:
    """Returns MeCab's options for a dictionary, given by name or path, and after them `option`. Raises UserError if the
    dictionary is missing."""
    return f"{mecab.dictionary_options(dictionary_folder(dictionary))} {option}".strip()


def build_splitter(options: str, *, normalize: bool = True, white_space: bool = False) -> MecabSplitter:
    """Returns a `MecabSplitter`. Raises UserError if MeCab cannot start with `options`."""
    try:
        return MecabSplitter(options, normalize=normalize, white_space=white_space)
    except mecab.MecabError as error:
        raise UserError(str(error)) from error


@functools.cache
def dictionary_fingerprint(folder: Path) -> str:
    """Returns a hash of the files in a dictionary's folder on which the segmentation depends."""
    total = hashlib.sha256()
    for name in ("sys.dic", "matrix.bin", "char.bin", "unk.dic", "dicrc"):
        file = folder / name
        if file.is_file():
            with file.open("rb") as stream:
                total.update(name.encode() + hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def options_folder(options: str) -> Path | None:
    """Returns the dictionary's folder in MeCab's `options`, None if they name none."""
    folders = _values(options, ("-d", "--dicdir"))
    return Path(folders[-1]) if folders else None


def options_fingerprint(options: str) -> str:
    """Returns a hash of the dictionaries that `options` name. Raises UserError if one is missing."""
    total = hashlib.sha256()
    folder = options_folder(options)
    if folder is not None:
        total.update(dictionary_fingerprint(folder).encode())
    for name in user_dictionaries(options):
        if not Path(name).is_file():
            raise UserError(f"MeCab's user dictionary {name}: no such file")
        total.update(Path(name).read_bytes())
    return total.hexdigest()


def user_dictionaries(options: str) -> list[str]:
    """Returns the files of user dictionaries in `options`."""
    return [name for names in _values(options, mecab.USER_DICTIONARY) for name in names.split(",")]  # as MeCab does


def named_files(options: str) -> list[str]:
    """Returns the files and folders that `options` name: dictionaries and settings."""
    others = (("-d", "--dicdir"), ("-r", "--rcfile"))
    named = [*(name for names in others for name in _values(options, names)), *user_dictionaries(options)]
    return [name for name in named if name != "/dev/null"]


def _values(options: str, names: Sequence[str]) -> list[str]:
    """Returns the values of the option that `names` are."""
    values: list[str] = []

    def keep(value: str) -> str:
        values.append(value)
        return value

    mecab.change_values(options, names, keep)
    return values


def copy_user_dictionaries(options: str, folder: Path) -> str:
    """Copies the user dictionaries that `options` name into `folder`. Returns the options with their names there.
    Raises UserError if two of them have one name."""

    def copy(name: str) -> str:
        new = folder / Path(name).name
        if new.exists() and not filecmp.cmp(name, new, shallow=False):
            raise UserError(f"MeCab's user dictionaries: two are called {new.name}; rename one of them")
        shutil.copyfile(name, new)
        return new.name

    return mecab.change_user_dictionaries(options, copy)
