"""What store.json records of shards and templates, and whether shards join without gaps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from terakoya.errors import UserError

SHARD, SHARD_BLOCKS = "shard", "shard blocks"
"""What a shard's store records: which one it is, and where its first block begins and its last one ends."""


def check_joined(extents: Sequence[str]) -> None:
    """UserError unless each of these shards of one corpus begins where the one before it ends."""
    for number, (one, other) in enumerate(pairwise(extents), start=1):
        end, begin = one.split(" to ")[-1], other.split(" to ")[0]
        if begin != end and not (end.endswith(":end") and begin.endswith(":0")):
            raise UserError(
                f"shards {number} and {number + 1}: expected the second to begin where the first ends ({end}), it "
                f"begins at {begin}; they were prepared by different versions of Python: prepare them again with one"
            )


TEMPLATE_INPUT = "tokenizer chat template"
"""The input of a store of conversations that says which template it was made with."""
