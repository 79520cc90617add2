"""Whether a folder that a run starts from counts words as the token stores do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.components.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FILES = ("tokenizer.json", "vocab.txt", "spiece.model", "vocab.json", "tokenizer_config.json")
"""Files of which one at least lies beside a model that has its tokenizer with it."""
SHOWN = 3


def vocabulary_problems(
    folder: Path, config: PretrainedConfig, vocabulary: Vocabulary, tokenizer_folder: Path
) -> list[str]:
    """What is different between the vocabulary of `folder` and the stores', a line each; none if nothing is.

    Compares sizes and, where a tokenizer lies in `folder`, every token's id with the tokenizer in `tokenizer_folder`.
    """
    problems = []
    if config.vocab_size != vocabulary.size:
        problems.append(
            f"its vocabulary has {config.vocab_size:,} entries, the stores' {vocabulary.size:,}; prepare the stores "
            "with the folder's tokenizer"
        )
    there = [name for name in FILES if (folder / name).is_file()]
    if not there or _same_files(folder, tokenizer_folder):
        return problems
    try:
        theirs, ours = _token_ids(folder, config), _token_ids(tokenizer_folder)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"its tokenizer ({there[0]}) cannot be compared with the stores': {error}")
        return problems
    if theirs != ours:
        problems.append(_difference(theirs, ours))
    return problems


def _same_files(folder: Path, other: Path) -> bool:
    """Whether one of the files that hold a whole vocabulary is the same, byte for byte, in both."""
    for name in FILES[:3]:
        one, two = folder / name, other / name
        if one.is_file() and two.is_file() and one.read_bytes() == two.read_bytes():
            return True
    return False


def _token_ids(folder: Path, config: PretrainedConfig | None = None) -> dict[str, int]:
    """Every token's id. `config` is that of the model in `folder`, of whose own code nothing is run."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)
    tokens: dict[str, int] = loaded.get_vocab()
    return tokens


def _difference(theirs: Mapping[str, int], ours: Mapping[str, int]) -> str:
    """A sentence with counts and the lowest ids that differ."""
    mine = {index: token for token, index in ours.items()}
    other = {index: token for token, index in theirs.items()}
    wrong = [index for index in sorted(mine.keys() | other.keys()) if mine.get(index) != other.get(index)]

    def named(tokens: Mapping[int, str], index: int) -> str:
        return json.dumps(tokens[index], ensure_ascii=False) if index in tokens else "nothing"

    examples = "; ".join(
        f"{index} is {named(other, index)} there and {named(mine, index)} here" for index in wrong[:SHOWN]
    )
    return (
        f"its tokenizer is another than the stores': {len(wrong):,} ids mean something else ({examples}); prepare the "
        "stores with the folder's tokenizer"
    )
