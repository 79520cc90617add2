"""The families that come with terakoya, each of which can be taken out: what it brings, for who asks for it then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Family:
    """A package beside the core that adds to it through hooks alone. `--without NAME` leaves it out.

    Attributes:
        verbs: of the command line, and options that it adds to others: "finetune", "estimate --gpus".
        functions: name in `terakoya` -> the module that has it.
        components: kinds and names: "importers megatron".
        keys: key paths of settings files.
        languages: names for `TERAKOYA_LANG`.
        engines: names in `parallel.engine`; "ddp" where processes work on the same rows.
        places: schemes of places; "*" for all that no other plugin has.
        transforms: of a run's module, by a value of `precision` or a key.
        record_formats: words for documents that are no plain text.
        hooks: of those that the core calls for one answer.
        needs: other families, without which it cannot be installed.
    """

    verbs: Sequence[str] = ()
    functions: Mapping[str, str] = field(default_factory=dict)
    components: Sequence[str] = ()
    keys: Sequence[str] = ()
    languages: Sequence[str] = ()
    engines: Sequence[str] = ()
    places: Sequence[str] = ()
    transforms: Sequence[str] = ()
    record_formats: Sequence[str] = ()
    hooks: Sequence[str] = ()
    needs: Sequence[str] = ()


FAMILIES: dict[str, Family] = {
    "checks": Family(verbs=("doctor", "store verify", "verify")),
    "cleaning": Family(
        verbs=("clean", "prepare --rejects", "prepare --rejects-text"),
        components=(
            "cleaning_steps characters",
            "cleaning_steps exact_duplicates",
            "cleaning_steps hold_out",
            "cleaning_steps length",
            "cleaning_steps near_duplicates",
            "cleaning_steps nfkc",
            "cleaning_steps sentences",
        ),
        hooks=("read_cleaning",),
    ),
    "clusters": Family(
        verbs=(
            "move",
            "estimate --gpus",
            "estimate --gpus-per-node",
            "prepare --engine",
            "prepare --executor",
            "prepare --executor-settings",
            "prepare --set",
        ),
        components=("launchers grid_engine", "launchers pbs", "launchers sagemaker"),
        needs=("launch", "parallel", "planning"),
    ),
    "compare": Family(verbs=("compare",), needs=("evaluation",)),
    "corpus": Family(verbs=("corpus", "corpus report", "tokenizer count")),
    "contract": Family(verbs=("plugins new", "plugins check"), needs=("parallel",)),
    "growth": Family(verbs=("tokenizer extend",), keys=("start_from.grow", "start_from.vocabulary")),
    "continuation": Family(
        verbs=("init --from", "init --replay", "init --replay-share"), needs=("pipeline", "planning")
    ),
    "conversations": Family(components=("objectives instruction",), record_formats=("conversations",)),
    "evaluation": Family(verbs=("evaluate",), functions={"evaluate": "terakoya_evaluation.evaluate"}),
    "filters": Family(
        components=(
            "cleaning_steps boilerplate",
            "cleaning_steps datatrove",
            "cleaning_steps hojichar",
            "cleaning_steps kana",
            "cleaning_steps language",
            "cleaning_steps lines",
            "cleaning_steps markup",
            "cleaning_steps repetition",
        ),
    ),
    "forks": Family(verbs=("average", "fork")),
    "hub": Family(verbs=("upload",), needs=("inference", "report")),
    "inference": Family(
        verbs=("try",),
        functions={"fill_mask": "terakoya_inference.predictions", "find_replaced": "terakoya_inference.predictions"},
    ),
    "japanese": Family(languages=("ja",)),
    "language_pretraining": Family(
        verbs=(
            "parameters show --data",
            "parameters show --model-type",
            "train --data",
            "train --do_whole_word_mask",
            "train --fp16_type",
            "train --model-type",
            "train --validation",
        ),
        components=("importers language_pretraining",),
    ),
    "launch": Family(
        verbs=("launch",),
        components=("events accelerate_requests", "launchers hosts", "launchers local", "launchers slurm"),
    ),
    "parallel": Family(engines=("ddp", "deepspeed", "fsdp")),
    "pipeline": Family(verbs=("demo", "run"), needs=("inference",)),
    "planning": Family(
        verbs=("estimate", "init", "train --dry-run"),
        functions={"estimate": "terakoya_planning.estimate"},
        needs=("pipeline",),
    ),
    "places": Family(places=("*",)),
    "quality": Family(
        verbs=(
            "finetune",
            "evaluate --tasks",
            "evaluate --seeds",
            "evaluate --learning-rate",
            "evaluate --epochs",
            "evaluate --batch-size",
        ),
        functions={
            "evaluate_tasks": "terakoya_quality.evaluation.tasks",
            "finetune": "terakoya_quality.finetuning.finetune",
        },
        components=("events task_scores",),
        needs=("evaluation",),
    ),
    "megatron": Family(
        verbs=("parameters import", "store import", "store export-blocks", "store import-blocks"),
        components=(
            "exporters megatron",
            "importers megatron",
            "importers megatron_deepspeed",
            "importers smdistributed",
        ),
    ),
    "memory": Family(transforms=("activation_checkpointing", "activation_offloading", "quantization")),
    "precision": Family(transforms=("fp8",)),
    "report": Family(verbs=("report", "tokenizer report")),
    "schemas": Family(verbs=("parameters schema",), needs=("pipeline",)),
    "screening": Family(
        components=("cleaning_steps decontaminate", "cleaning_steps personal_data", "cleaning_steps words")
    ),
    "stores": Family(verbs=("store merge", "store sample", "store split")),
    "watch": Family(keys=("profile", "spikes"), components=("events logits", "events optimizer_state")),
}
"""Name -> family. Its package is `terakoya_NAME`, its entry point is called NAME."""


def missing_family(what: str, name: str) -> str:
    """Returns which family has `name` among its `what` (a field of `Family`), as the end of a
    sentence for who does not find it; empty if none has."""
    for family, brings in FAMILIES.items():
        if name in getattr(brings, what):
            return f"; it belongs to the family {family}, which is not installed or excluded"
    return ""


def missing_needs(name: str) -> list[str]:
    """Returns the families that the family `name` needs and that are not installed; none for another name."""
    needs = FAMILIES[name].needs if name in FAMILIES else ()
    return [each for each in needs if find_spec(f"terakoya_{each}") is None]


def function_of_family(name: str) -> Any:
    """Returns what a family has for `terakoya` as `name`. Raises AttributeError if no installed one has it."""
    for family in FAMILIES.values():
        module = family.functions.get(name)
        if module is not None and find_spec(module.partition(".")[0]) is not None:
            return getattr(import_module(module), name)
    raise AttributeError(f"terakoya has no attribute {name!r}{missing_family('functions', name)}")
