"""Spans in a text, such as names: a tag for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from terakoya.json_settings import short_json
from terakoya_quality.finetuning import metrics
from terakoya_quality.finetuning.metrics import Entity
from terakoya_quality.finetuning.positions import Part, in_characters
from terakoya_quality.finetuning.rows import Row
from terakoya_quality.finetuning.task import IGNORED, Feature, Task, TextEncoder, check_labels, label_ids

OUTSIDE = "O"


@dataclass(frozen=True)
class TaggedText:
    """A text with its spans, counted in characters, or words with their spans, counted in words."""

    text: str | Sequence[str]
    spans: frozenset[Entity]
    tags: Sequence[str] = ()


class NamedEntities(Task[TaggedText]):
    """Spans with their types, in words with tags (`tokens`, `tags`) or in a text (`text`, `spans`)."""

    name = "ner"
    columns = "tokens and tags (B-X, I-X, O), or text and spans ([{start, end, label}] or [{span, type}])"
    metrics = ("f1", "precision", "recall", "recall_limit")
    """`recall_limit` is the recall of right tags: no tag finds a name that begins or ends inside a token, or is cut."""
    auto_class = "AutoModelForTokenClassification"
    forms = (("tokens", "tagged words"), ("spans", "spans"))
    parts = (("spans", "span"),)
    suits_muon = False
    needs_offsets = True

    def __init__(self, train: Sequence[Row]) -> None:
        self.in_words = "tokens" in train[0].values
        found = {tag for row in train for tag in (_tags(row) if self.in_words else _span_tags(row))}
        self.labels = sorted(found | {OUTSIDE}, key=lambda tag: (tag != OUTSIDE, tag))
        check_labels(self.labels, train)

    def _read(self, rows: Sequence[Row]) -> list[TaggedText]:
        if self.in_words:
            return [self._words(row) for row in rows]
        found = in_characters("spans", [_spans(row) for row in rows])
        return [self._text(row, parts) for row, parts in zip(rows, found, strict=True)]

    def _words(self, row: Row) -> TaggedText:
        words, tags = _words(row, "tokens"), _tags(row)
        if len(words) != len(tags):
            row.refuse(f"expected as many tags as tokens, got {len(words)} tokens and {len(tags)} tags")
        label_ids(self.labels, [(row, tag) for tag in tags])
        return TaggedText(words, frozenset(metrics.entities(tags)), tags)

    def _text(self, row: Row, found: Sequence[Part]) -> TaggedText:
        spans = sorted(((part.kind, part.start, part.end) for part in found), key=lambda span: span[1:])
        for (_, _, end), (kind, start, _) in pairwise(spans):
            if start < end:
                row.refuse(f"spans: expected spans that do not overlap, but {kind} at {start} begins before {end}")
        label_ids(self.labels, [(row, f"B-{kind}") for kind, _, _ in spans])
        return TaggedText(row.text("text"), frozenset(spans))

    def features(self, examples: Sequence[TaggedText], encoder: TextEncoder) -> list[Feature]:
        """Implements `Task.features`: a tag for the first token of each word, or for every token of a text."""
        return [self._feature(number, each, encoder) for number, each in enumerate(examples)]

    def _feature(self, number: int, example: TaggedText, encoder: TextEncoder) -> Feature:
        options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
        options["is_split_into_words"] = self.in_words
        encoded = encoder.tokenizer(example.text, verbose=False, **options)
        if len(encoded["input_ids"]) > encoder.max_length:
            encoder.cut += 1
            encoded = encoder.tokenizer(example.text, truncation=True, max_length=encoder.max_length, **options)
        special = encoded.pop("special_tokens_mask")
        offsets = encoded.pop("offset_mapping")
        spans: list[tuple[int, int] | None] = []
        if self.in_words:
            before = None
            for word in encoded.word_ids():
                spans.append((word, word + 1) if word is not None and word != before else None)
                before = word
            tags = [OUTSIDE if span is None else example.tags[span[0]] for span in spans]
        else:
            assert isinstance(example.text, str)
            spans = [
                None if flag else _without_spaces(example.text, *span)
                for flag, span in zip(special, offsets, strict=True)
            ]
            tags = _token_tags(spans, example.spans)
        ids = {tag: id for id, tag in enumerate(self.labels)}
        target = [IGNORED if span is None else ids.get(tag, 0) for span, tag in zip(spans, tags, strict=True)]
        return Feature([dict(encoded)], target, number, spans)

    def stack_targets(self, features: Sequence[Feature]) -> Tensor:
        """Implements `Task.stack_targets`: (B, T)."""
        length = max(len(feature.target) for feature in features)
        return torch.tensor([feature.target + [IGNORED] * (length - len(feature.target)) for feature in features])

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Implements `Task.loss`: cross-entropy over the tokens that have a tag; 0 where none has."""
        if not bool((targets != IGNORED).any()):
            return logits.float().sum() * 0
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def scores(
        self, examples: Sequence[TaggedText], features: Sequence[Feature], logits: Sequence[np.ndarray]
    ) -> dict[str, float]:
        predicted = [self.decode_spans(feature, each) for feature, each in zip(features, logits, strict=True)]
        gold = [each.spans for each in examples]
        limit = metrics.span_scores([self._decode(each, each.target) for each in features], gold)["recall"]
        return {**metrics.span_scores(predicted, gold), "recall_limit": limit}

    def decode_spans(self, feature: Feature, logits: np.ndarray) -> list[Entity]:
        return self._decode(feature, [int(each.argmax()) for each in logits])

    def _decode(self, feature: Feature, ids: Sequence[int]) -> list[Entity]:
        kept = [(span, self.labels[id]) for span, id in zip(feature.spans, ids, strict=True) if span is not None]
        found = metrics.entities([tag for _, tag in kept])
        return [(kind, kept[first][0][0], kept[last - 1][0][1]) for kind, first, last in found]


def _words(row: Row, column: str) -> list[str]:
    value = row.value(column)
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(isinstance(each, str) for each in words):
        row.refuse(f"{column}: expected a list of texts, got {short_json(value)}")
    return words


def _tags(row: Row) -> list[str]:
    tags = _words(row, "tags")
    for tag in tags:
        if tag != OUTSIDE and (tag[:2] not in ("B-", "I-", "E-", "S-") or len(tag) < 3):
            row.refuse(f"tags: expected O, B-TYPE or I-TYPE (also E-TYPE, S-TYPE), got {short_json(tag)}")
    return tags


def _spans(row: Row) -> list[Part]:
    value = row.value("spans")
    if not isinstance(value, list):
        row.refuse(f"spans: expected a list, got {short_json(value)}")
    return [_span(row, each) for each in value]


def _span(row: Row, value: Any) -> Part:
    try:
        own = None
        if isinstance(value, dict):
            start, end = value["span"] if "span" in value else (value["start"], value["end"])
            kind = value["label"] if "label" in value else value["type"]
            own = value.get("text") or value.get("name") or None
        else:
            start, end, kind = value
        if type(start) is int and type(end) is int and isinstance(kind, str) and isinstance(own, str | None):
            return Part(row, "text", start, end, own, kind)
    except (KeyError, TypeError, ValueError):
        pass
    row.refuse(f"spans: expected {{start, end, label}}, got {short_json(value)}")


def _span_tags(row: Row) -> list[str]:
    return [f"{prefix}-{part.kind}" for part in _spans(row) for prefix in "BI"]


def _without_spaces(text: str, start: int, end: int) -> tuple[int, int] | None:
    """Returns the span without white space around it; None if there is nothing else in it."""
    part = text[start:end]
    inner = part.strip()
    return (start + len(part) - len(part.lstrip()), start + len(part.rstrip())) if inner else None


def _token_tags(spans: Sequence[tuple[int, int] | None], gold: frozenset[Entity]) -> list[str]:
    """Returns the tag of each token: B- where it is the first that shares a character with a gold span, I- after. A
    token that several spans share has the tag of the last."""
    tags = [OUTSIDE] * len(spans)
    for kind, start, end in sorted(gold, key=lambda entity: (entity[1:], entity[0])):
        prefix = "B"
        for number, span in enumerate(spans):
            if span is not None and span[0] < end and span[1] > start:
                tags[number], prefix = f"{prefix}-{kind}", "I"
    return tags
