"""The model card: what a model is, what it was trained on and how, as the README.md of its repository.

The metadata block above the text is the Hub's (https://huggingface.co/docs/hub/model-cards).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from terakoya.runs import metrics
from terakoya.runs.charts import Line, standalone_chart
from terakoya.runs.metrics import Metrics
from terakoya.version import __version__

CURVE = "training.svg"
"""The picture's name beside the card."""
POINTS = 12
"""Rows of the table of losses."""
TASKS = (("ForCausalLM", "text-generation"), ("LMHeadModel", "text-generation"), ("ForMaskedLM", "fill-mask"))
"""What the Hub calls a model whose class ends so."""


@dataclass(frozen=True)
class Trained:
    """Where a model comes from.

    Attributes:
        manifest: that of the checkpoint it was taken from.
        metrics: what the run wrote down up to that checkpoint.
    """

    manifest: Mapping[str, Any]
    metrics: Metrics

    @classmethod
    def read(cls, checkpoint: Path) -> Trained:
        """What the folder `checkpoint` and the run around it say; a run without metrics has none."""
        manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
        run = checkpoint.parent.parent
        records = metrics.read(run).records if (run / metrics.FILE).is_file() else ()
        by_then = tuple(each for each in records if int(each.get("step") or 0) <= manifest["step"])
        return cls(manifest, Metrics(by_then))

    def picture(self) -> str | None:
        """The loss over the steps as an SVG; None where the run wrote none down."""
        found = metrics.curves(self.metrics, ["loss"]).points
        lines = [
            Line(0, name, points, name.startswith("validation"), number)
            for number, (name, points) in enumerate(sorted(found.items(), key=lambda each: len(each[0].split())))
        ]
        return standalone_chart(lines, title="loss over optimizer steps") if lines else None


def write(
    name: str,
    models: Mapping[str, str],
    *,
    trained: Trained | None,
    license: str | None,
    languages: Sequence[str],
    sample: tuple[str, str] | None,
    trust_remote_code: bool = False,
) -> str:
    """The text of the card of the repository `name`.

    Args:
        models: by sub-folder ("" is the repository itself) the Transformers class that loads each.
        sample: a prompt and what the model made of it.
    """
    from huggingface_hub import ModelCardData

    kinds = list(models.values())
    task = next((task for ending, task in TASKS if len(kinds) == 1 and kinds[0].endswith(ending)), None)
    data = ModelCardData(
        language=list(languages) or None,
        license=license,
        library_name="transformers",
        pipeline_tag=task,
        tags=["terakoya", *(["custom_code"] if trust_remote_code else [])],
    )
    parts = [f"---\n{data.to_yaml()}\n---", f"# {name.rpartition('/')[2]}", _use(name, models, trust_remote_code)]
    if sample is not None:
        parts.append(f"## A sample\n\n```\n{sample[0]}\n```\n\n```\n{sample[1].rstrip()}\n```")
    if trained is not None:
        parts += [_training(trained), _losses(trained), _parameters(trained.manifest)]
    parts.append(f"Made with terakoya {__version__}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _use(name: str, models: Mapping[str, str], trust_remote_code: bool) -> str:
    """The lines of Python that load the models."""
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
            'prompt = tokenizer("...", add_special_tokens=False, return_tensors="pt")  # nothing is put around it',
            "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0], skip_special_tokens=True))",
        ]
    return "```python\n" + "\n".join(lines) + "\n```"


def _trained_count(manifest: Mapping[str, Any]) -> str:
    """How many were trained, and of how many, where that is not all."""
    every, lora = manifest["parameter_count"], manifest["parameters"].get("lora")
    trained = manifest.get("trained_parameter_count", every)
    if lora is not None:
        return f"{trained:,}, as adapters of rank {lora['r']} (LoRA), merged into {every:,}"
    return f"{trained:,}" if trained == every else f"{trained:,} of {every:,}"


def _training(trained: Trained) -> str:
    """What the model saw: steps, rows, tokens, stores with their fingerprints, versions."""
    manifest = trained.manifest
    parameters = manifest["parameters"]
    world = manifest["world"]
    versions = ", ".join(f"{package} {version}" for package, version in manifest["versions"].items())
    lines = [
        "## Training",
        "",
        "| | |",
        "|---|---|",
        f"| architecture | `{parameters['architecture']['type']}` |",
        f"| parameters trained | {_trained_count(manifest)} |",
        f"| objective | `{parameters['objective']['type']}` |",
        f"| vocabulary | {manifest['vocabulary']['size']:,} |",
        f"| steps | {manifest['step']:,} of {manifest['max_steps']:,} |",
        f"| rows | {manifest['consumed_rows']:,} of {parameters['data']['sequence_length']:,} tokens |",
        f"| tokens | {manifest['consumed_tokens']:,} |",
        f"| processes | {world['processes']} on {world['device']}, {world['engine']}, {parameters['precision']} |",
        f"| versions | {versions} |",
        "",
        "| data | share of rows | fingerprint (SHA-256) |",
        "|---|---:|---|",
    ]
    shares = {each["store"]: each["weight"] for each in parameters["data"]["train"]}
    total = sum(shares.values())
    for store, fingerprint in manifest["stores"].items():
        share = f"{shares[store] / total:.2%}" if store in shares else "validation"
        lines.append(f"| {PurePath(store).name} | {share} | `{fingerprint}` |")
    return "\n".join(lines)


def _losses(trained: Trained) -> str:
    """A picture and a table of the loss over the steps: training, and the newest validation of each store by then."""
    steps = metrics.kept_steps(trained.metrics)
    if not steps:
        return ""
    chosen = sorted({round(index * (len(steps) - 1) / max(1, POINTS - 1)) for index in range(POINTS)})
    checks = [entry for entry in trained.metrics.of_kind("validation") if entry.get("store")]
    stores = list(dict.fromkeys(entry["store"] for entry in checks))
    heads = ["step", "tokens", "training loss", *(f"validation on {PurePath(store).name}" for store in stores)]
    shown = f"![training loss in blue, validation in red]({CURVE})"
    lines = ["## Losses", "", shown, "", f"| {' | '.join(heads)} |", "|---:" * len(heads) + "|"]
    for entry in (steps[index] for index in chosen):
        by_then = {check["store"]: check["loss"] for check in checks if check["step"] <= entry["step"]}
        cells = [f"{by_then[store]:.4f}" if store in by_then else "" for store in stores]
        row = [f"{entry['step']:,}", f"{entry['tokens']:,}", f"{entry['loss']:.4f}", *cells]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _parameters(manifest: Mapping[str, Any]) -> str:
    """All parameters; of absolute folders the last name alone, since where they lay is nobody's business."""
    text = json.dumps(_without_places(manifest["parameters"]), indent=2, ensure_ascii=False)
    return f"## Parameters\n\n<details>\n\n```json\n{text}\n```\n\n</details>"


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_places(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_places(inner) for inner in value]
    return PurePath(value).name if isinstance(value, str) and PurePath(value).is_absolute() else value
