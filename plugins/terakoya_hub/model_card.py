"""The model card: a README.md that describes the model, its data and its training.

The Hub defines the metadata block above the text (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from terakoya.inference.loading import DISCRIMINATOR_CLASS
from terakoya.toolkit.formats.tokenizer_needs import describe_tokenizer
from terakoya.version import __version__
from terakoya_hub import card_evaluation, card_training, card_use
from terakoya_hub.card_training import TrainingFacts
from terakoya_hub.scores import Measurement

CARD = "README.md"
DATASET_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""The name of a data set on the Hub, which may stand in the metadata: OWNER/NAME."""
_SPECIAL = re.compile(r"([&%$#_{}])")
"""The signs that BibTeX would read as its own."""


@dataclass(frozen=True)
class Card:
    """What the card of a repository tells.

    Attributes:
        name: the repository, ORGANISATION/NAME.
        models: sub-folder ("" is the repository itself) -> Transformers class that loads the model.
        facts: how the model was trained; None if unknown.
        license: the Hub's identifier of the licence.
        languages: codes of the languages.
        sample: a prompt and the model's output for it.
        tokenizer: the settings in tokenizer_config.json; None if there is none.
        datasets: where the text comes from: names of data sets on the Hub, or words.
        dataset_license: the licence of the text, in words.
        evaluations: what was measured besides the run's own validation.
        authors: who made the model, for its citation.
        citation: the authors' own entry of BibTeX, in place of one made from `authors`.
        weights: file of weights -> SHA-256.
        trust_remote_code: whether the models contain code of their own.
        discriminators: the sub-folders of those that tell which tokens were replaced, whatever their class.
    """

    name: str
    models: Mapping[str, str]
    facts: TrainingFacts | None = None
    license: str | None = None
    languages: Sequence[str] = ()
    sample: tuple[str, str] | None = None
    tokenizer: Mapping[str, Any] | None = None
    datasets: Sequence[str] = ()
    dataset_license: str | None = None
    evaluations: Sequence[Measurement] = ()
    authors: Sequence[str] = ()
    citation: str | None = None
    weights: Mapping[str, str] | None = None
    trust_remote_code: bool = False
    discriminators: Collection[str] = ()

    @property
    def short_name(self) -> str:
        """The repository without its owner."""
        return self.name.rpartition("/")[2]

    @property
    def classes(self) -> list[str]:
        """What the models are for: their classes, and for all discriminators that of ELECTRA."""
        return [DISCRIMINATOR_CLASS if sub in self.discriminators else kind for sub, kind in self.models.items()]

    def text(self) -> str:
        manifest = None if self.facts is None else self.facts.manifest
        measured = [] if self.facts is None else card_evaluation.read_validation(self.facts.metrics)
        results = [*measured, *self.evaluations]
        parts = [
            f"---\n{self._metadata(results)}\n---",
            f"# {self.short_name}",
            card_use.show_code(self.name, self.models, self.trust_remote_code),
            "" if self.tokenizer is None else describe_tokenizer(self.tokenizer),
            "" if self.sample is None else _sample(*self.sample),
            card_use.describe(self.classes, manifest),
            self._text_section(),
            card_evaluation.table(results),
        ]
        if self.facts is not None:
            parts += [
                card_training.describe(self.facts.manifest, self.facts.metrics),
                card_training.describe_losses(self.facts),
                _parameters(self.facts.manifest),
            ]
        if self.weights:
            rows = [f"| {name} | `{digest}` |" for name, digest in self.weights.items()]
            parts.append("\n".join(["## Files", "", "| file | SHA-256 |", "|---|---|", *rows]))
        parts += [self._citation_section(), f"Made with terakoya {__version__}."]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _metadata(self, results: Sequence[Measurement]) -> str:
        from huggingface_hub import ModelCardData

        origins = [] if self.facts is None else card_training.origins(self.facts.manifest)
        task = card_use.find_task(self.classes) or "feature-extraction"
        metadata = ModelCardData(
            language=list(self.languages) or None,
            license=self.license,
            library_name="transformers",
            base_model=[each for each in origins if "/" in each] or None,
            datasets=[each for each in self.datasets if DATASET_NAME.fullmatch(each)] or None,
            pipeline_tag=card_use.find_task(self.classes, card_use.TASKS) if len(self.models) == 1 else None,
            tags=["terakoya", *(["custom_code"] if self.trust_remote_code else [])],
            model_name=self.short_name,
            eval_results=card_evaluation.to_metadata(results, task=task) or None,
        )
        return str(metadata.to_yaml())

    def _text_section(self) -> str:
        cleaning = {} if self.facts is None else self.facts.cleaning
        lines = [f"- {each}" for each in self.datasets]
        lines += [f"- store {name}: {each}" for name, each in cleaning.items()]
        if self.dataset_license is not None:
            lines += ["", f"Licence of the text: {self.dataset_license}"]
        if not self.datasets:
            lines = ["The authors do not say where the text comes from.", *([""] if lines else []), *lines]
        return "\n".join(["## Text", "", *lines]).replace("\n\n\n", "\n\n")

    def _citation_section(self) -> str:
        entries = [] if self.citation is None else [self.citation.strip()]
        if self.citation is None and self.authors:
            names, title = " and ".join(map(_escape, self.authors)), f"{{{_escape(self.short_name)}}}"
            fields = [("author", names), ("title", title)]
            records = () if self.facts is None else self.facts.metrics.records
            finished = records[-1].get("time") if records else None
            if finished is not None:
                fields.append(("year", time.strftime("%Y", time.gmtime(finished))))
            fields.append(("howpublished", rf"\url{{https://huggingface.co/{self.name}}}"))
            entries.append(_entry("misc", re.sub(r"[^\w.-]", "", self.short_name), fields))
        title = "{terakoya}: training language models from raw text, {Japanese} first"
        software = [("author", "{The terakoya developers}"), ("title", title), ("version", __version__)]
        entries.append(_entry("software", "terakoya", software))
        return "## Citation\n\n```bibtex\n" + "\n\n".join(entries) + "\n```"


def _sample(prompt: str, output: str) -> str:
    return f"## A sample\n\n```\n{prompt}\n```\n\n```\n{output.rstrip()}\n```"


def _entry(kind: str, key: str, fields: Sequence[tuple[str, str]]) -> str:
    return "\n".join([f"@{kind}{{{key},", *(f"  {name} = {{{value}}}," for name, value in fields), "}"])


def _escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


def _parameters(manifest: Mapping[str, Any]) -> str:
    """All parameters as JSON. Absolute paths are shortened to their last part, because they are private."""
    text = json.dumps(_without_folders(manifest["parameters"]), indent=2, ensure_ascii=False)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return f"## Parameters\n\nSHA-256 of this JSON: `{fingerprint}`\n\n<details>\n\n```json\n{text}\n```\n\n</details>"


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    return PurePath(value).name if isinstance(value, str) and PurePath(value).is_absolute() else value
