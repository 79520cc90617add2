"""Questions answered by a part of a text, as in SQuAD and JSQuAD: the model marks where the answer begins and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from terakoya.json_settings import short_json
from terakoya_quality.finetuning import metrics
from terakoya_quality.finetuning.positions import Part, in_characters
from terakoya_quality.finetuning.rows import Row
from terakoya_quality.finetuning.task import Feature, Task, TextEncoder

LONGEST_ANSWER = 30
"""The largest number of tokens in an answer, as in SQuAD's scripts."""
CANDIDATES = 20
"""The numbers of first and of last positions that are combined, as in SQuAD's scripts."""


@dataclass(frozen=True)
class AskedText:
    """A question, the text that answers it, and its answers: each a text and the position of its first character."""

    question: str
    context: str
    answers: Sequence[tuple[str, int]]


class Answers(Task[AskedText]):
    """The part of a context that answers a question. Long contexts are read in windows that overlap."""

    name = "qa"
    columns = "question, context, answers ([{text, answer_start}]); or SQuAD's JSON"
    metrics = ("exact_match", "f1", "squad_exact_match", "squad_f1")
    auto_class = "AutoModelForQuestionAnswering"
    forms = (("question", "asked text"),)
    parts = (("answers", "answer"),)
    needs_offsets = True

    def __init__(self, train: Sequence[Row]) -> None:
        """Takes nothing from the training examples."""

    def _read(self, rows: Sequence[Row]) -> list[AskedText]:
        found = in_characters("answers", [_answers(row) for row in rows])
        return [
            AskedText(row.text("question"), row.text("context"), [(str(part.own), part.start) for part in parts])
            for row, parts in zip(rows, found, strict=True)
        ]

    def features(self, examples: Sequence[AskedText], encoder: TextEncoder) -> list[Feature]:
        """Implements `Task.features`: one for each window of each context."""
        return [feature for number, each in enumerate(examples) for feature in _windows(number, each, encoder)]

    def logits(self, output: Any, choices: int) -> Tensor:
        """Implements `Task.logits`: (B, T, 2), of first and last tokens."""
        return torch.stack([output.start_logits, output.end_logits], dim=-1)

    def scores(
        self, examples: Sequence[AskedText], features: Sequence[Feature], logits: Sequence[np.ndarray]
    ) -> dict[str, float]:
        best: list[tuple[float, str]] = [(-np.inf, "")] * len(examples)
        for feature, each in zip(features, logits, strict=True):
            found = _best_span(feature.spans, each)
            if found is not None and found[0] > best[feature.example][0]:
                best[feature.example] = (found[0], examples[feature.example].context[found[1] : found[2]])
        return metrics.answer_scores(
            [text for _, text in best], [[text for text, _ in each.answers] for each in examples]
        )


def _answers(row: Row) -> list[Part]:
    value = row.value("answers")
    if isinstance(value, dict) and isinstance(value.get("text"), list):  # the form of the Hub's copies of SQuAD
        value = [
            {"text": text, "answer_start": start}
            for text, start in zip(value["text"], value.get("answer_start") or (), strict=False)
        ]
    answers = []
    for each in value if isinstance(value, list) else ():
        text, start = (each.get("text"), each.get("answer_start")) if isinstance(each, dict) else (None, None)
        if not isinstance(text, str) or not text or type(start) is not int:
            row.refuse(f"answers: expected [{{text, answer_start}}], got {short_json(value)}")
        answers.append(Part(row, "context", start, None, text))
    if not answers:
        row.refuse(f"answers: expected at least one {{text, answer_start}}, got {short_json(value)}")
    return answers


def _windows(number: int, example: AskedText, encoder: TextEncoder) -> list[Feature]:
    """Returns the windows over the context of one example, each behind the question; of a question that takes more than
    half of a window the rest is cut."""
    tokenizer, question = encoder.tokenizer, example.question
    spans = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    if len(spans) > encoder.max_length // 2:
        encoder.cut += 1
        spans = spans[: encoder.max_length // 2]
        question = question[: spans[-1][1]]
    room = max(2, encoder.max_length - len(spans) - tokenizer.num_special_tokens_to_add(pair=True))
    encoded = tokenizer(
        question, example.context, truncation="only_second", max_length=encoder.max_length,
        stride=min(encoder.stride, room // 2), return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    features = []
    for window, offsets in enumerate(encoded["offset_mapping"]):
        parts = encoded.sequence_ids(window)
        inside = [tuple(span) if part == 1 else None for span, part in zip(offsets, parts, strict=True)]
        inputs = {name: encoded[name][window] for name in encoded if name not in _NOT_INPUTS}
        features.append(Feature([inputs], _target(inside, *example.answers[0]), number, inside))
    return features


_NOT_INPUTS = ("offset_mapping", "overflow_to_sample_mapping")


def _target(spans: Sequence[tuple[int, int] | None], text: str, start: int) -> list[int]:
    """Returns the numbers of the first and last token of the answer; of the first token of all, twice, where the answer
    is not whole in these `spans`."""
    end = start + len(text)
    inside = [number for number, span in enumerate(spans) if span is not None and span[0] < end and span[1] > start]
    if not inside:
        return [0, 0]
    first, last = spans[inside[0]], spans[inside[-1]]
    assert first is not None and last is not None
    return [inside[0], inside[-1]] if first[0] <= start and last[1] >= end else [0, 0]


def _best_span(spans: Sequence[tuple[int, int] | None], logits: np.ndarray) -> tuple[float, int, int] | None:
    """Returns the score of the best part of a window, its first character and the one after its last; None where the
    window has none."""
    scores = np.where(np.array([span is None for span in spans])[:, None], -np.inf, logits)  # (T, 2)
    firsts, lasts = (np.argsort(-scores[:, side], kind="stable")[:CANDIDATES] for side in (0, 1))
    best: tuple[float, int, int] | None = None
    for first in firsts:
        for last in lasts:
            begin, end = spans[first], spans[last]
            if begin is None or end is None or not first <= last < first + LONGEST_ANSWER:
                continue
            score = float(scores[first, 0] + scores[last, 1])
            if best is None or score > best[0]:
                best = (score, begin[0], end[1])
    return best
