"""What a kind of task is: examples from rows, inputs for a model, a loss, and scores.

Legend: B examples of a batch, T tokens, C choices, K labels.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from terakoya.errors import UserError
from terakoya_quality.finetuning.rows import Row

Example = TypeVar("Example")
Inputs = Mapping[str, list[int]]
"""What a tokenizer gives for one text: `input_ids` and others, each (T,)."""

logger = logging.getLogger("terakoya")

IGNORED = -100
"""The target of tokens that no loss is computed for."""


@dataclass(frozen=True)
class Feature:
    """What a model reads at once.

    Attributes:
        inputs: one text, or one for each choice.
        target: what is learned: a label, a number, a label for each token, or two positions.
        example: the number of the example that it is from.
        spans: for each token its first position in the example and the one after its last; None where it does not
            count; empty for tasks without positions.
    """

    inputs: Sequence[Inputs]
    target: Any
    example: int
    spans: Sequence[tuple[int, int] | None] = ()


class TextEncoder:
    """A tokenizer with the longest input, which counts the texts that it cuts.

    Attributes:
        tokenizer: of the model.
        max_length: the largest number of tokens, special ones included.
        stride: tokens that two windows over a long context share.
        cut: the number of texts that were too long so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, stride: int) -> None:
        self.tokenizer, self.max_length, self.stride = tokenizer, max_length, stride
        self.cut = 0

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Inputs]:
        """Returns the inputs of `texts`, each with its entry of `pairs`; too long ones are cut, of a pair the longer
        text first."""
        rows = _rows(self.tokenizer(list(texts), list(pairs) if pairs else None, verbose=False))
        for number, row in enumerate(rows):
            if len(row["input_ids"]) > self.max_length:
                pair = pairs[number] if pairs else None
                encoded = self.tokenizer(texts[number], pair, truncation=True, max_length=self.max_length)
                rows[number] = dict(encoded)
                self.cut += 1
        return rows


def _rows(encoded: Mapping[str, Sequence[list[int]]]) -> list[Inputs]:
    return [{name: values[number] for name, values in encoded.items()} for number in range(len(encoded["input_ids"]))]


class Task(ABC, Generic[Example]):
    """A kind of task. An object of it knows the labels of its training examples."""

    name: ClassVar[str]
    columns: ClassVar[str]
    """What its files contain, in words."""
    metrics: ClassVar[tuple[str, ...]]
    """Names of its scores; the first one chooses between settings. A larger score is better."""
    auto_class: ClassVar[str]
    """Transformers' class that loads a model with a head for it."""
    forms: ClassVar[Sequence[tuple[str, str]]]
    """A column that tells the form of a row, and the form in `KNOWN`."""
    parts: ClassVar[Sequence[tuple[str, str]]] = ()
    """A column with a list of objects, and their kind in `KNOWN`."""
    suits_muon: ClassVar[bool] = True
    """Whether small models learn it best with Muon, as labels of texts and not of tokens (docs/how-to/quality.md)."""
    needs_offsets: ClassVar[bool] = False
    """Whether the tokenizer must say which characters a token is."""

    labels: Sequence[str] = ()

    @abstractmethod
    def __init__(self, train: Sequence[Row]) -> None:
        """Takes the labels from the training examples. Raises UserError if they do not make a task."""

    def read(self, rows: Sequence[Row]) -> list[Example]:
        """Returns the examples in `rows`, and logs columns that are not read. Raises UserError with the place of a row
        that is none, has a label that the training examples do not have, or a column that would change what is
        trained."""
        unread: Counter[str] = Counter()
        for row in rows:
            kind = next((kind for column, kind in self.forms if column in row.values), None)
            unread.update(row.unread(kind) if kind else ())
            unread.update({key for column, part in self.parts for key in row.unread(part, column)})
        if unread:
            counts = ", ".join(f"{key} ({count:,})" for key, count in sorted(unread.items()))
            logger.info("%s: columns that are not read, and how many examples have them: %s", rows[0].file, counts)
        return self._read(rows)

    @abstractmethod
    def _read(self, rows: Sequence[Row]) -> list[Example]:
        """Does `read` for rows with known columns."""

    @abstractmethod
    def features(self, examples: Sequence[Example], encoder: TextEncoder) -> list[Feature]:
        """Returns what the model reads of `examples`."""

    def head_settings(self) -> dict[str, Any]:
        """Returns the settings of the model's config that its head needs."""
        if not self.labels:
            return {}
        names = dict(enumerate(self.labels))
        return {"num_labels": len(names), "id2label": names, "label2id": {name: id for id, name in names.items()}}

    def logits(self, output: Any, choices: int) -> Tensor:
        """Returns what is scored of a model's output: (B, ...)."""
        logits: Tensor = output.logits
        return logits

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of a batch, by default of ids; `targets` as `stack_targets` returns them."""
        return torch.nn.functional.cross_entropy(logits.float(), targets)

    def stack_targets(self, features: Sequence[Feature]) -> Tensor:
        """Returns the targets of a batch as one tensor (B, ...)."""
        return torch.tensor([feature.target for feature in features])

    @abstractmethod
    def scores(
        self, examples: Sequence[Example], features: Sequence[Feature], logits: Sequence[np.ndarray]
    ) -> dict[str, float]:
        """Returns the task's scores by name; `logits` are those of `features`, without padding."""


def sorted_labels(labels: set[str]) -> list[str]:
    """Returns `labels` in the order of their ids: whole numbers by value, others by their characters."""
    numbers = {label: int(label) for label in labels if re.fullmatch(r"[+-]?\d+", label)}
    return sorted(labels, key=lambda label: (label not in numbers, numbers.get(label, 0), label))


def label_ids(labels: Sequence[str], found: Sequence[tuple[Row, str]]) -> list[int]:
    """Returns the ids of the `found` labels. Raises UserError with the place of one that training does not have."""
    ids = {label: id for id, label in enumerate(labels)}
    for row, label in found:
        if label not in ids:
            known = ", ".join(labels[:10]) + ", ..." * (len(labels) > 10)
            row.refuse(f'the label "{label}" does not occur in the training examples, which have {known}')
    return [ids[label] for _, label in found]


def check_labels(labels: Sequence[str], train: Sequence[Row]) -> None:
    """Raises UserError unless there are two labels to tell apart, and by more than white space."""
    file = train[0].file
    if len(labels) < 2:
        raise UserError(f'{file}: expected examples with at least two labels to tell apart, found only "{labels[0]}"')
    known: dict[str, str] = {}
    for label in labels:
        if (other := known.setdefault(label.strip(), label)) != label:
            raise UserError(f'{file}: the labels "{other}" and "{label}" differ in white space alone; make them one')
