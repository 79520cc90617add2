"""The loss of each document, for models without an objective: every token is predicted, by every model alike.

A causal model predicts each token from those before it, as `terakoya evaluate` has it. Of a masked model each token is
masked once: of every piece of a document there are `COPIES`, in which the same seventh of the tokens is masked for
every model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from terakoya.errors import UserError
from terakoya.runs.checkpoints import read_manifest, while_kept
from terakoya.toolkit.random_keys import draws, hash_u64
from terakoya_evaluation import causal, models
from terakoya_evaluation.batches import ScoredSequence, batch_by_length, negative_log_likelihood
from terakoya_evaluation.data import DataSet
from terakoya_evaluation.models import EvaluatedModel
from terakoya_evaluation.options import EvaluateOptions

COPIES = 7
"""Masked copies of a piece: about the share of 15 % that most models learn with."""


@dataclass(frozen=True)
class DocumentLosses:
    """What a model finds on each document of a data set.

    Attributes:
        sums: the negative log-likelihood of each, in nats, (n,).
        tokens, characters: of each, (n,); characters are 0 where they are not known.
        ids: a hash of the tokens of each, (n,).
    """

    sums: np.ndarray
    tokens: np.ndarray
    characters: np.ndarray
    ids: np.ndarray


def load_model(options: EvaluateOptions, device: torch.device) -> EvaluatedModel:
    """Loads the model of a Transformers folder, or of a checkpoint. Raises UserError as these do."""
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    if (checkpoint := options.checkpoint()) is not None:
        with while_kept(checkpoint):
            return models.load_checkpoint(checkpoint, read_manifest(checkpoint), device=device, dtype=dtype)
    trust = options.trust_remote_code
    return models.load_folder(options.source, device=device, dtype=dtype, trust_remote_code=trust)


def common_window(loaded: Sequence[EvaluatedModel]) -> int:
    """Returns the number of tokens that every model sees at once. Raises UserError for models of two kinds."""
    kinds = {each.kind: each.folder for each in loaded}
    if len(kinds) > 1:
        raise UserError(
            f"{kinds['causal']} is a causal model, {kinds['masked']} a masked one: the loss of a token that is seen "
            "from one side and of one that is seen from both cannot be compared; compare them with --task"
        )
    return min(each.window(None) for each in loaded)


def measure_documents(
    model: EvaluatedModel, data: DataSet, *, window: int, limit: int | None, batch_tokens: int
) -> DocumentLosses:
    """Returns what `model` finds on each document of `data`, in pieces of `window` tokens.

    Raises:
        UserError: the tokenizer has no [MASK], [CLS] and [SEP], or BOS and EOS, of a masked model.
    """
    further = {"use_cache": False} if model.kind == "causal" else {}
    pad = model.special_token_id("pad") or 0
    start = model.special_token_id("bos", "eos") if model.kind == "causal" else None
    frame = [model.special_token_id(*names) for names in (("cls", "bos"), ("sep", "eos"), ("mask",))]
    if model.kind == "masked" and None in frame:
        raise UserError(f"{model.folder}: its tokenizer has no [CLS] or BOS, [SEP] or EOS, or [MASK]")
    sums, tokens, characters, hashes = [], [], [], []
    for number, text in enumerate(data.texts("document", limit)):
        if model.kind == "causal":
            ids = text.ids if start is None else np.concatenate([[start], text.ids])
            items = list(causal.windows(ids, length=window, stride=max(1, window // 2))) if len(ids) > 1 else []
        else:
            items = list(masked_copies(text.ids, [each or 0 for each in frame], window, number))
        total = torch.zeros((), dtype=torch.float64, device=model.model.device)
        for batch in batch_by_length(items, tokens=batch_tokens):
            total += negative_log_likelihood(model.model, batch, pad=pad, device=model.model.device, **further)
        sums.append(total)
        tokens.append(sum(len(item.labels) for item in items))
        characters.append(text.characters)
        hashes.append(zlib.crc32(text.ids.tobytes()))
    if not sums:
        raise UserError(f"{data.name}: expected documents, found none")
    return DocumentLosses(torch.stack(sums).cpu().numpy(), *map(np.array, (tokens, characters, hashes)))


def masked_copies(ids: np.ndarray, frame: Sequence[int], window: int, number: int) -> Iterator[ScoredSequence]:
    """Yields the masked copies of the document `number`, `ids` (m,): each token is masked in one of them.

    Args:
        frame: the ids before and after a piece, and of [MASK].
        window: the length of a piece with its frame.
    """
    before, after, mask = frame
    for begin in range(0, len(ids), window - 2):
        framed = np.concatenate([[before], ids[begin : begin + window - 2], [after]])
        positions = np.arange(1, len(framed) - 1)
        key = np.array([hash_u64("compare", number, begin)], np.uint64)
        order = positions[np.argsort(draws(key, "mask", positions), kind="stable")]
        for chosen in (np.sort(order[first::COPIES]) for first in range(min(COPIES, len(order)))):
            masked = framed.copy()
            masked[chosen] = mask
            yield ScoredSequence(masked, chosen, framed[chosen])
