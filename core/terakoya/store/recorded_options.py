"""What store.json records about shards and templates, and the check that shards follow each other without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from terakoya.errors import UserError

SHARD, SHARD_BLOCKS = "shard", "shard blocks"
"""Keys in the store of a shard: its number and the count, and where its first block begins and its last one ends."""


def check_adjacent(extents: Sequence[str]) -> None:
    """Raises UserError unless each of these shards of one corpus begins where the shard before it ends."""
    for number, (extent, next_extent) in enumerate(pairwise(extents), start=1):
        end, begin = extent.split(" to ")[-1], next_extent.split(" to ")[0]
        if begin != end and not (end.endswith(":end") and begin.endswith(":0")):
            raise UserError(
                f"shards {number} and {number + 1}: expected the second to begin where the first ends ({end}), it "
                f"begins at {begin}; different versions of Python prepared them: prepare them again with one version"
            )


TEMPLATE_INPUT = "tokenizer chat template"
"""Key of the hash of the chat template among the inputs of a store of conversations."""

WORDS_INPUT = "words"
"""Key of the hash of the word finder among the inputs of a store, and of its settings among the options."""

UNKNOWN = "unknown tokens"
"""The note that counts the tokens of the text for which the tokenizer has no piece; absent where there is none."""
