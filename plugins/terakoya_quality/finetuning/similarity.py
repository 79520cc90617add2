"""How alike two texts are, without training: the cosine of the angle between the means of their tokens' vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel

from terakoya.errors import UserError
from terakoya.inference.loading import load_model_and_tokenizer
from terakoya.toolkit.formats.model_folder import silence_transformers
from terakoya_quality.finetuning import loop, metrics
from terakoya_quality.finetuning.model import ModelUse, is_of_head, load_fast_tokenizer, longest_input, pad_id
from terakoya_quality.finetuning.rows import Row
from terakoya_quality.finetuning.settings import LONGEST
from terakoya_quality.finetuning.task import Inputs, TextEncoder
from terakoya_quality.finetuning.texts import Regression


class TextVectors:
    """Turns texts into vectors: the mean of the last hidden states of all tokens, special ones included."""

    def __init__(self, folder: Path, *, max_length: int | None, use: ModelUse) -> None:
        """Loads the body of the model in `folder`. Inputs have at most `max_length` tokens, or what it takes.
        Raises UserError if it cannot be loaded."""
        tokenizer = load_fast_tokenizer(folder, trust=use.trust, needs_offsets=False)
        with silence_transformers():
            model, _ = load_model_and_tokenizer(
                AutoModel, folder, trust=use.trust, is_new=is_of_head, dtype=torch.float32
            )
        if model.config.is_encoder_decoder:
            raise UserError(f"{folder}: {model.config.model_type} is an encoder-decoder; expected an encoder")
        self.model, self.precision = model.to(use.device), use.precision
        self.pad = pad_id(tokenizer, model, folder)
        length = longest_input(model, max_length, default=LONGEST, shorten=True)
        self.encoder = TextEncoder(tokenizer, max_length=length, stride=1)

    @torch.no_grad()
    def vectors(self, texts: Sequence[str], *, batch_size: int) -> np.ndarray:
        """Returns the vectors of `texts`, (N, hidden size)."""
        rows = self.encoder.encode(texts)
        lengths = [len(row["input_ids"]) for row in rows]
        return np.stack(loop.longest_first(lengths, batch_size, lambda some: self._means([rows[n] for n in some])))

    def _means(self, rows: Sequence[Inputs]) -> np.ndarray:
        tensors = loop.pad_inputs(rows, self.model, self.pad)
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            hidden = self.model(**tensors).last_hidden_state.float()
        mask = tensors["attention_mask"][..., None].float()
        means: np.ndarray = ((hidden * mask).sum(1) / mask.sum(1)).cpu().numpy()
        return means


def similarity_scores(vectors: TextVectors, rows: Sequence[Row], *, batch_size: int) -> dict[str, float]:
    """Returns the correlations of the cosines with the labels of `rows`, by name. Raises UserError for rows that are
    no pairs with a number."""
    examples = Regression(rows).read(rows)
    if any(each.pair is None for each in examples):
        rows[0].refuse("expected pairs: text1 and text2")
    one, other = (
        vectors.vectors([str(getattr(each, name)) for each in examples], batch_size=batch_size)
        for name in ("text", "pair")
    )
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines = (one * other).sum(1) / np.maximum(norms, 1e-12)
    gold = np.array([each.target for each in examples])
    return {"pearson": metrics.pearson(cosines, gold), "spearman": metrics.spearman(cosines, gold)}
