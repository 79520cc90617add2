"""What a reader of an export is told about its tokenizer: its kind, and what to install."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from terakoya.toolkit.tokenizers.mecab import user_dictionaries
from terakoya_tokenizer.mecab import change_user_dictionaries


def describe_tokenizer(settings: Mapping[str, Any]) -> str:
    """Returns which tokenizer a model has, and which packages it needs besides Transformers, in a sentence or two.

    `settings` is the content of tokenizer_config.json.
    """
    kind = settings.get("tokenizer_class", "AutoTokenizer")
    packages: tuple[str, ...] = ()
    further = ""
    words = settings.get("word_tokenizer_type")
    if kind == "BertJapaneseTokenizer" and words != "basic":
        kind += f" over the words of {words or 'mecab'}"
        packages, further = _needs_of_words(str(words or "mecab"), settings)
    elif "SentencePiece" in kind or "BertGeneration" in kind or settings.get("tokenizer_file") == "tokenizer.model":
        packages = ("sentencepiece",)
    needs = f" It needs `pip install {' '.join(packages)}`{further}." if packages else ""
    if "fugashi" in packages and settings.get("subword_tokenizer_type", "wordpiece") in ("wordpiece", "character"):
        needs += (
            " The package `terakoya_tokenizer` reads it as a fast tokenizer, with offsets and the same ids: "
            "`pip install ./core/terakoya_tokenizer` in a copy of terakoya's repository, and "
            "`import terakoya_tokenizer; terakoya_tokenizer.register()` before `AutoTokenizer`."
        )
    if kind == "SentencePieceBackend" and "auto_map" in settings:
        needs += " Transformers 4 loads it with `trust_remote_code=True`, 5 without."
    return f"The tokenizer is a {kind}.{needs}"


def hub_arguments(settings: Mapping[str, Any], name: str = "NAME", folder: str = "") -> str:
    """Returns the arguments, as Python, with which `AutoTokenizer` finds the user dictionaries of MeCab in the `folder`
    of a repository, whose `name` is an expression; empty where the tokenizer has none."""
    arguments = dict(settings.get("mecab_kwargs") or {})
    option = (arguments.pop("mecab_option", None) or "").replace("{", "{{").replace("}", "}}")
    files = user_dictionaries(option)
    option = change_user_dictionaries(option, lambda file: f"@ {files.index(file)}@")
    for number, file in enumerate(files):  # the blank makes shlex quote the word, as a fetched file's path may need
        option = option.replace(f"@ {number}@", f"{{hf_hub_download({name}, {str(PurePosixPath(folder, file))!r})}}")
    pairs = [*(f'"{key}": {value!r}' for key, value in arguments.items()), f'"mecab_option": f"{option}"']
    beside = f'subfolder="{folder}", ' if folder else ""
    return f"{beside}mecab_kwargs={{{', '.join(pairs)}}}" if files else ""


def _needs_of_words(words: str, settings: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """Returns the packages of the word splitter `words`, and what it needs beside them, as the end of a sentence."""
    if words == "sudachi":
        dictionary = (settings.get("sudachi_kwargs") or {}).get("sudachi_dict_type") or "core"
        return ("sudachipy", f"sudachidict-{dictionary}"), ""
    if words == "jumanpp":
        return ("rhoknp",), " and the program jumanpp (https://github.com/ku-nlp/jumanpp)"
    mecab = {"mecab_dic": "unidic_lite", **(settings.get("mecab_kwargs") or {})}
    dictionary = mecab["mecab_dic"]
    if not dictionary:
        return ("fugashi",), f" and the dictionary of its MeCab options, `{mecab.get('mecab_option') or ''}`"
    further = " and `python -m unidic download`" if dictionary == "unidic" else ""
    if files := user_dictionaries(mecab.get("mecab_option") or ""):
        named = " and ".join(f"`{file}`" for file in files)
        further += (
            f", and {named} of this repository in the working directory, where MeCab looks for user dictionaries (or "
            f"`AutoTokenizer.from_pretrained(NAME, {hub_arguments(settings)})`)"
        )
    return ("fugashi", dictionary.replace("_", "-")), further
