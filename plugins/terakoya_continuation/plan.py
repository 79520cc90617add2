"""The run that trains a published model further, as a pipeline file with the reason for each number.

The rate rises again and then falls to nothing (Ibrahim et al., 2024, "Simple and Scalable Strategies to Continually
Pre-train Large Language Models", arXiv:2403.08763); rows of general text keep what the model knew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terakoya.corpus.corpus import Corpus
from terakoya.corpus.files import find_files
from terakoya.errors import UserError
from terakoya.log import plural, translated
from terakoya_continuation.fit import Fit
from terakoya_continuation.published import OBJECTIVES, Kind, PublishedModel
from terakoya_planning.choosing import (
    LEAST_STEPS_BETWEEN,
    VALIDATION_SHARE,
    Candidate,
    Choice,
    Machine,
    least_rows,
)
from terakoya_planning.corpus_facts import CorpusFacts
from terakoya_planning.new_pipeline import FEW_DOCUMENTS, explain_checkpoints, held_out_share
from terakoya_planning.speed import describe_hours

PASSES: Mapping[Kind, int] = {"masked": 10, "causal": 4}
"""How often the text of the field is read at most: a quarter of what `init` takes for a masked model that begins at
random, and as often as it takes for a causal one (Muennighoff et al., 2023)."""
ROWS = 256
"""Rows of a step, before a short run gets fewer."""
RATE_OF_BASE = 2e-4
"""The peak of the learning rate at a hidden size of 768 and 256 rows a step: that of Gururangan et al. (2020,
arXiv:2004.10964) at 2,048 rows, 5e-4, times the square root of the change. It falls as one over the size, as Adam's
best rate does (Yang et al., 2022, arXiv:2203.03466)."""
SAVED = 0.05
"""The share of tokens that more pieces must save: the smallest saving that was measured, and there it helped
(docs/tutorials/continued-pretraining.md)."""
MORE = 8
"""The vocabulary gets at most this part more pieces, each seen `LEAST_OFTEN` times."""
LEAST_OFTEN = 20
MASKED = "30 % of the tokens are masked at first, 15 % at the end, with which a new model learns sooner than with 15 %."
FORGETS = (
    "There is no general text, so the model forgets: in a test its loss on such text rose by 0.67 bits a character, "
    "with --replay FILES of it by 0.08."
)
"""Both are measured: docs/explanation/recipes.md, docs/tutorials/continued-pretraining.md."""
NAMES = FIELD, REPLAY = "field", "replay"
"""The corpora of a pipeline with general text."""


@dataclass(frozen=True)
class Source:
    """A corpus: what names its files, what was seen of it, and about how many tokens of the model it has."""

    files: Sequence[str]
    facts: CorpusFacts
    tokens: int

    def corpus(self, **reading: Any) -> Corpus:
        """Returns the documents."""
        return Corpus(find_files(self.files), field=self.facts.field, documents=self.facts.documents, **reading)

    @property
    def held_out(self) -> tuple[int, float]:
        """The number and the share of the documents for validation."""
        share = held_out_share(self.facts.count)
        return max(1, round(share * self.facts.count)), share

    def describe(self) -> str:
        """Returns a sentence about it."""
        facts = self.facts
        return (
            f"{', '.join(self.files)}: about {facts.count:,} documents, {facts.characters:,} characters, "
            f"{self.tokens:,} tokens of this model; {self.held_out[0]:,} documents are for validation."
        )

    def entry(self) -> dict[str, Any]:
        """Returns how a pipeline reads it, and holds documents out: the last ones where they are few, since by their
        hashes none might be."""
        facts, (count, share) = self.facts, self.held_out
        few = facts.count < FEW_DOCUMENTS and {*facts.formats} <= {"jsonl", "txt"}
        return {
            "corpus": list(self.files),
            **({"field": facts.field} if facts.formats != ("txt",) else {}),
            **({"documents": facts.documents} if facts.documents != "blank" else {}),
            **({"hold_out": count} if few else {}),
            **({} if few else {"clean": [{"type": "exact_duplicates"}, {"type": "hold_out", "share": share}]}),
        }


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of the run.

    Attributes:
        folder: that of its tokenizer.
        fit: how the model's own divides the text of the field.
        longer: the same with more pieces; None where that was not tried, and `reason` says why not.
        extended: whether the run takes them.
    """

    folder: Path
    fit: Fit
    longer: Fit | None = None
    reason: str = ""
    extended: bool = False

    @property
    def used(self) -> Fit:
        """How the run's tokenizer divides the text of the field."""
        return self.longer if self.extended and self.longer is not None else self.fit

    def describe(self) -> str:
        """Returns the decision in a sentence, with its figures."""
        found = f"{self.fit.rate:.3f} tokens a character, {self.fit.unknown / self.fit.tokens:.2%} of them unknown"
        if self.longer is None:
            return f"The vocabulary stays as it is, with {found}: {self.reason}."
        more, saved = self.longer.pieces - self.fit.pieces, self.fit.saved_by(self.longer)
        if self.extended:
            return f"The vocabulary gets {more:,} more pieces, which save {saved:.1%}; without them {found}."
        return (
            f"The vocabulary stays as it is, with {found}: {more:,} more pieces would save {saved:.1%}, and "
            f"{SAVED:.0%} are worth it."
        )


def make_parameters(model: PublishedModel, words: bool) -> dict[str, Any]:
    """Returns the parameters of a long run, without its stores and weights. `words` says whether whole words can be
    masked."""
    objective: dict[str, Any] = {"type": OBJECTIVES[model.kind], "layout": "packed" if model.packs else "stream"}
    if model.kind == "masked":
        objective |= {"mlm_probability": {"start": 0.3, "end": 0.15}, "whole_word_mask": words}
    return {
        "data": {"sequence_length": model.length},
        "architecture": model.architecture,
        "objective": objective,
        "optimizer": {"type": "adamw", "learning_rate": RATE_OF_BASE * 768 / model.width, "weight_decay": 0.01},
        "schedule": {"type": "linear"},
        "batch_size": {"-1": ROWS},
        "max_grad_norm": 1.0,
        "checkpoint": {"save_steps": 1, "keep": 3},
        "evaluation": {"steps": 1, "batches": 10},
        "trackers": [{"type": "tensorboard"}],
        "seed": 42,
    }


def choose_run(
    model: PublishedModel, parameters: dict[str, Any], vocabulary: Vocabulary, sources: Sequence[Source], share: float,
    *, machine: Machine, hours: float,
) -> Choice:  # fmt: skip
    """Returns the run over the text of the field, `sources[0]`, and a `share` of rows of the other one's.

    Raises:
        UserError: the text is too short for a step, or the model too large for the machine.
    """
    field = sources[0]
    least = least_rows(model.length) * model.length
    if field.tokens < least or field.facts.count < 2:
        raise UserError(
            f"CORPUS: expected at least 2 documents and {least:,} tokens, which a step takes, got about "
            f"{field.facts.count:,} and {field.tokens:,}; give more text of the field"
        )
    candidate = Candidate.of(model.name, parameters | {"max_steps": 1}, vocabulary.used.pieces, machine)
    held_out = sum(round(each.tokens * each.held_out[1]) for each in sources)
    read = PASSES[model.kind] * field.tokens / (1 - share)
    choice = candidate.run_within(hours, read, field.tokens, held_out)
    if choice is None:
        raise UserError(f"{model.name} does not fit into the memory of {machine.name}, or a step of it takes too long")
    return choice


def complete(model: PublishedModel, vocabulary: Vocabulary, choice: Choice) -> dict[str, Any]:
    """Returns the parameters of the run with the weights that it begins with."""
    start = {
        "folder": model.name,
        **({"drop_heads": True} if model.kind == "masked" else {}),
        **({"new_heads": True} if model.lacks_head else {}),
        **({"vocabulary": "extend"} if vocabulary.extended else {}),
    }
    return {"start_from": start, **choice.parameters}


def make_pipeline(
    model: PublishedModel, vocabulary: Vocabulary, choice: Choice, sources: Sequence[Source], share: float,
    *, machine: Machine, work: Path,
) -> tuple[dict[str, Any], dict[str, str]]:  # fmt: skip
    """Returns the content of a pipeline file with outputs in the folder `work`, and the comments by key path."""
    parameters = complete(model, vocabulary, choice) | {"data": {"sequence_length": model.length}}
    entries = [each.entry() for each in sources]
    if len(sources) > 1:
        named = zip(NAMES, entries, (1 - share, share), strict=True)
        corpora = {name: {**entry, "weight": round(100 * weight, 1)} for name, entry, weight in named}
    pipeline = {
        **({"corpora": corpora} if len(sources) > 1 else entries[0]),
        "tokenizer_folder": str(vocabulary.folder),
        "store": str(work / "store"),
        "validation_store": str(work / "store.val"),
        "parameters": parameters,
        "run": str(work / "run"),
        "export": str(work / "model"),
        **({"training_processes": machine.count} if machine.device.gpu else {}),
    }
    return pipeline, _comments(model, vocabulary, choice, sources, share, machine=machine)


def _comments(
    model: PublishedModel, vocabulary: Vocabulary, choice: Choice, sources: Sequence[Source], share: float,
    *, machine: Machine,
) -> dict[str, str]:  # fmt: skip
    parameters, estimated = choice.parameters, choice.estimated
    assert estimated.speed is not None, "a choice has a speed"
    rows, most = sum(parameters["batch_size"].values()), PASSES[model.kind]
    read = [choice.trained_tokens * part / each.tokens for part, each in zip((1 - share, share), sources, strict=False)]
    seen = f"{read[0]:.3g} passes over the field (at most {most} are useful)"
    comments = {"corpus": sources[0].describe(), "parameters": FORGETS}
    if len(sources) > 1:
        seen = (
            f"{read[0]:.3g} passes over the field (at most {most} are useful) and {read[1]:.3g} over the general text"
        )
        comments = {f"corpora.{name}.corpus": each.describe() for name, each in zip(NAMES, sources, strict=True)}
        comments[f"corpora.{REPLAY}"] = (
            f"General text is {share:.0%} of the rows, so that the model keeps what it knew; both are validated."
        )
    started = (
        f"{model.name}: {model.type}, {estimated.sizes.parameters / 1e6:,.1f} M parameters, "
        f"{vocabulary.used.pieces:,} pieces."
    )
    return {
        **comments,
        "tokenizer_folder": vocabulary.describe(),
        "words": "The tokenizer does not know where words start; MeCab finds them, so that whole words are masked.",
        "parameters.start_from": f"{started} Its head begins with random weights." if model.lacks_head else started,
        "parameters.architecture": "As in the model's config.json.",
        **({"parameters.objective": MASKED} if model.kind == "masked" else {}),
        "parameters.optimizer": f"AdamW, as of most published models. The rate is {RATE_OF_BASE:g} x 768 / "
        f"{model.width}, times the square root of {rows:,} / {ROWS} rows. A model that was stopped early needs more.",
        "parameters.schedule": "The rate rises again in the first tenth of the run, then it falls to 0.",
        "parameters.batch_size": f"{rows:,} row{plural(rows)} of {model.length:,} tokens a step; a short run has "
        "fewer rows.",
        "parameters.micro_batch_size": f"Rows that one process computes at once: {estimated.memory.peak / 1e9:.1f} GB "
        "at the peak.",
        "parameters.max_steps": f"{choice.steps:,} step{plural(choice.steps)} x {rows:,} row{plural(rows)} x "
        f"{model.length:,} tokens: {seen}. Predicted: {translated(describe_hours(choice.hours))} on {machine.name}, "
        f"{translated(estimated.speed.said)}.",
        "parameters.precision": machine.explain_precision(),
        "parameters.checkpoint": explain_checkpoints(),
        "parameters.evaluation": "Before the first step it measures the model as it was, then after each tenth of the "
        "run, each twentieth of a long one, and at least every half-hour where that takes no more than "
        f"{VALIDATION_SHARE:.0%} of the time, but at least {LEAST_STEPS_BETWEEN} steps apart.",
        "training_processes": "One for each GPU.",
    }
