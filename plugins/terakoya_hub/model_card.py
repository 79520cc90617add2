"""Writes the model card, a README.md that describes the model, its data and its training.

The Hub defines the metadata block above the text (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from terakoya.errors import UserError
from terakoya.inference.scores import Measurement
from terakoya.runs import metrics
from terakoya.runs.checkpoints import read_manifest
from terakoya.runs.idle_starts import without_idle_starts
from terakoya.runs.metrics import Metrics
from terakoya.store.token_store import read_facts
from terakoya.toolkit.formats.tokenizer_needs import describe_tokenizer
from terakoya.version import __version__
from terakoya_hub import card_citation, card_evaluation, card_training, card_use
from terakoya_report.charts import Line, standalone_chart

CARD = "README.md"
CHART = "training.svg"
"""File name of the chart of losses, in the card's folder."""
TABLE_ROWS = 12
"""Number of rows in the table of losses."""
TASKS = (
    ("ForCausalLM", "text-generation"),
    ("LMHeadModel", "text-generation"),
    ("ForMaskedLM", "fill-mask"),
    ("ForConditionalGeneration", "text2text-generation"),
    ("ForSequenceClassification", "text-classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForQuestionAnswering", "question-answering"),
    ("ForMultipleChoice", "multiple-choice"),
)
"""Ending of a model's class -> the Hub's name of its task."""
DATASET_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
"""The name of a data set on the Hub, which may stand in the metadata: OWNER/NAME."""
EVALUATED_TASKS = (*TASKS, ("ElectraForPreTraining", "token-classification"), ("ForPreTraining", "fill-mask"))
"""The same for the entries of the model index, which cannot be without a task: a discriminator classifies tokens."""


@dataclass(frozen=True)
class TrainingFacts:
    """How a model was trained.

    Attributes:
        manifest: the manifest of its checkpoint.
        metrics: the metrics of the run up to that checkpoint.
        cleaning: name of a store that was trained on -> the steps that cleaned its text, and what they dropped.
    """

    manifest: Mapping[str, Any]
    metrics: Metrics
    cleaning: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Path) -> TrainingFacts:
        """Reads the manifest of the folder `checkpoint` and the metrics, if any, of the run that contains it."""
        manifest = read_manifest(checkpoint)
        above = checkpoint.absolute().parents[:2]  # RUN of RUN/model-best, or of RUN/checkpoints/step-...
        run = next((folder for folder in above if (folder / metrics.FILE).is_file()), None)
        records = () if run is None else without_idle_starts(metrics.read(run)).records
        earlier = tuple(record for record in records if int(record.get("step") or 0) <= manifest["step"])
        return cls(manifest, Metrics(earlier), _read_cleaning(manifest))

    def loss_chart(self) -> str | None:
        """The loss over the steps as an SVG; None if the metrics contain no loss."""
        curves = metrics.curves(self.metrics, ["loss"]).points
        lines = [
            Line(0, _curve_label(name), points, name.startswith("validation"), max(0, number - 1))
            for number, (name, points) in enumerate(sorted(curves.items(), key=lambda curve: curve[0] != "loss"))
        ]
        return standalone_chart(lines, title="loss over optimizer steps") if lines else None


def _read_cleaning(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Returns `TrainingFacts.cleaning`, of the stores that are still what the run was trained on."""
    parameters = manifest["parameters"]
    data = parameters["data"]
    phases = [phase["data"] or {} for phase in parameters.get("phases") or ()]
    found = {}
    for each in [entry for stage in (data, *(data.get("stages") or ()), *phases) for entry in stage.get("train") or ()]:
        try:
            facts = read_facts(Path(each["store"]))
        except UserError:
            continue
        description = _describe_cleaning(facts.options)
        if description is not None and facts.fingerprint == manifest["stores"].get(each["store"]):
            found[PurePath(each["store"]).name] = description
    return found


def _describe_cleaning(options: Mapping[str, Any]) -> str | None:
    """Returns the cleaning steps among the options of a store and what they dropped; None where there were none, or
    several lists of steps, as in a merged store."""
    try:
        steps = ", ".join(step["type"] for step in json.loads(options.get("clean") or "")["steps"])
    except ValueError:
        return None
    counts = {name: count for name, count in options.items() if name.startswith("clean: ") and isinstance(count, int)}
    counted = ", ".join(f"{count:,} {name.removeprefix('clean: ')}" for name, count in counts.items())
    return f"cleaned with {steps}" + (f": {counted}" if counted else "")


def _curve_label(name: str) -> str:
    """Returns what the legend calls the curve `name`: training, or the name of the validation store."""
    store = name.removeprefix("validation ").removesuffix("loss").strip()
    return "training" if name == "loss" else f"validation on {PurePath(store).name}" if store else "validation"


def write(
    name: str,
    models: Mapping[str, str],
    *,
    facts: TrainingFacts | None,
    license: str | None,
    languages: Sequence[str],
    sample: tuple[str, str] | None,
    tokenizer: Mapping[str, Any] | None = None,
    datasets: Sequence[str] = (),
    dataset_license: str | None = None,
    evaluations: Sequence[Measurement] = (),
    authors: Sequence[str] = (),
    citation: str | None = None,
    weights: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Returns the text of the card of the repository `name`.

    Args:
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
    """
    from huggingface_hub import ModelCardData

    classes = list(models.values())
    task = next((task for ending, task in TASKS if len(classes) == 1 and classes[0].endswith(ending)), None)
    results = [*(card_evaluation.read_validation(facts.metrics) if facts is not None else ()), *evaluations]
    evaluated = (task for ending, task in EVALUATED_TASKS for each in classes if each.endswith(ending))
    metadata = ModelCardData(
        language=list(languages) or None,
        license=license,
        library_name="transformers",
        base_model=([] if facts is None else [each for each in card_training.origins(facts.manifest) if "/" in each])
        or None,
        datasets=[each for each in datasets if DATASET_NAME.fullmatch(each)] or None,
        pipeline_tag=task,
        tags=["terakoya", *(["custom_code"] if trust_remote_code else [])],
        model_name=name.rpartition("/")[2],
        eval_results=card_evaluation.to_metadata(results, task=next(evaluated, "feature-extraction")) or None,
    )
    parts = [f"---\n{metadata.to_yaml()}\n---", f"# {name.rpartition('/')[2]}", _usage(name, models, trust_remote_code)]
    if tokenizer is not None:
        parts.append(describe_tokenizer(tokenizer))
    if sample is not None:
        parts.append(f"## A sample\n\n```\n{sample[0]}\n```\n\n```\n{sample[1].rstrip()}\n```")
    parts += [
        card_use.describe(classes, None if facts is None else facts.manifest),
        _text(datasets, dataset_license, facts.cleaning if facts is not None else {}),
        card_evaluation.table(results),
    ]
    if facts is not None:
        parts += [card_training.describe(facts.manifest, facts.metrics), _losses(facts), _parameters(facts.manifest)]
    if weights:
        parts.append("\n".join(["## Files", "", "| file | SHA-256 |", "|---|---|", *_digests(weights)]))
    finished = facts.metrics.records[-1].get("time") if facts is not None and facts.metrics.records else None
    parts.append(card_citation.describe(name, authors=authors, seconds=finished, entry=citation))
    parts.append(f"Made with terakoya {__version__}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _digests(files: Mapping[str, str]) -> list[str]:
    return [f"| {name} | `{digest}` |" for name, digest in files.items()]


def _usage(name: str, models: Mapping[str, str], trust_remote_code: bool) -> str:
    """Returns Python code that loads the models."""
    lines = [f"from transformers import AutoTokenizer, {', '.join(dict.fromkeys(models.values()))}", ""]
    trust = ", trust_remote_code=True" if trust_remote_code else ""
    for folder, kind in models.items():
        sub = f', subfolder="{folder}"' if folder else ""
        lines.append(f'{folder or "model"} = {kind}.from_pretrained("{name}"{sub}{trust})')
    sub = f', subfolder="{next(iter(models))}"' if "" not in models else ""
    lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}"{sub}{trust})')
    if models == {"": "AutoModelForCausalLM"}:
        lines += [
            "",
            'prompt = tokenizer("...", add_special_tokens=False, return_tensors="pt")  # without special tokens',
            "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0], skip_special_tokens=True))",
        ]
    return "```python\n" + "\n".join(lines) + "\n```"


def _text(datasets: Sequence[str], license: str | None, cleaning: Mapping[str, str]) -> str:
    """Returns the section about the origin, the cleaning and the licence of the text."""
    lines = [*(f"- {each}" for each in datasets), *(f"- store {name}: {each}" for name, each in cleaning.items())]
    if license is not None:
        lines += ["", f"Licence of the text: {license}"]
    if not datasets:
        lines = ["The authors do not say where the text comes from.", *([""] if lines else []), *lines]
    return "\n".join(["## Text", "", *lines]).replace("\n\n\n", "\n\n")


def _losses(facts: TrainingFacts) -> str:
    """A chart and a table of the losses: of training steps, and of the last validation up to each of them that no row
    before has. A validation before the first step has a row of its own."""
    steps = metrics.kept_steps(facts.metrics)
    if not steps:
        return ""
    chosen = sorted({round(index * (len(steps) - 1) / max(1, TABLE_ROWS - 1)) for index in range(TABLE_ROWS)})
    validations = [entry for entry in facts.metrics.of_kind("validation") if entry.get("store")]
    stores = list(dict.fromkeys(entry["store"] for entry in validations))
    header = ["step", "tokens", "training loss", *(f"validation on {PurePath(store).name}" for store in stores)]
    image = f"![loss of training and validation over the steps]({CHART})"
    lines = ["## Losses", "", image, "", f"| {' | '.join(header)} |", "|---:" * len(header) + "|"]
    rows = [steps[index] for index in chosen]
    if any(check["step"] == 0 for check in validations):
        rows.insert(0, {"step": 0, "tokens": 0})
    before = -1
    for entry in rows:
        losses = {check["store"]: check["loss"] for check in validations if before < check["step"] <= entry["step"]}
        before = entry["step"]
        shown = [entry.get("loss"), *(losses.get(store) for store in stores)]  # null where it was not finite
        cells = ["" if loss is None else f"{loss:.4f}" for loss in shown]
        row = [f"{entry['step']:,}", f"{entry['tokens']:,}", *cells]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _parameters(manifest: Mapping[str, Any]) -> str:
    """All parameters as JSON. Absolute paths are shortened to their last part, because they are private."""
    text = json.dumps(_without_folders(manifest["parameters"]), indent=2, ensure_ascii=False)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return f"## Parameters\n\nSHA-256 of this JSON: `{fingerprint}`\n\n<details>\n\n```json\n{text}\n```\n\n</details>"


def _without_folders(value: Any) -> Any:
    """`value` with the last part of each absolute path in place of the path."""
    if isinstance(value, Mapping):
        return {key: _without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_folders(inner) for inner in value]
    return PurePath(value).name if isinstance(value, str) and PurePath(value).is_absolute() else value
