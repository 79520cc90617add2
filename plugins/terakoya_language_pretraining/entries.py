"""retarfi/language-pretraining's parameter.json: named entries with hyphenated keys, read as they are.

An entry becomes the JSON that `Parameters.from_dict` reads. Constants of the original's code are written out:
AdamW without bias correction, eps 1e-6, weight decay 0.01, clipping at 1.0, linear warm-up and decay, seed 42.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from terakoya.errors import UserError, nearest
from terakoya.json_settings import explain, read_settings, short_json
from terakoya_language_pretraining.start_folders import SIZES, StartFolders, read_start_folders


def _hyphenate(name: str) -> str:
    return name if name.startswith("pretrained_") else name.replace("_", "-")


class LanguagePretrainingEntry(BaseModel):
    """One entry of the file. Fields without a default are required."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=_hyphenate)

    number_of_layers: PositiveInt
    hidden_size: PositiveInt
    sequence_length: PositiveInt
    ffn_inner_hidden_size: PositiveInt
    attention_heads: PositiveInt
    warmup_steps: NonNegativeInt
    learning_rate: PositiveFloat
    batch_size: Annotated[dict[str, PositiveInt], Field(min_length=1)]
    """Rows of one micro-step on each node, by node rank; "-1" is the only node."""
    train_steps: PositiveInt

    save_steps: PositiveInt = 50_000
    logging_steps: PositiveInt = 5_000
    accumulation_steps: PositiveInt = 1
    fp16_type: Literal[0, 1, 2, 3] = 0
    bf16: bool = False

    embedding_size: PositiveInt | None = None
    generator_size: str | None = None
    mask_percent: Annotated[float, Field(gt=0, lt=100)] | None = None

    pretrained_model_name_or_path: str | None = None
    pretrained_generator_model_name_or_path: str | None = None
    pretrained_discriminator_model_name_or_path: str | None = None
    flozen_layers: Annotated[int, Field(ge=-1)] = -1
    """The number of lowest layers whose weights stay as they are, together with the embeddings; -1: all are trained.
    """


SHIPPED = Path(__file__).with_name("parameter.json")
RENAMED = {"debertav2": "deberta_v2"}
"""Families with another name in the file."""
ELECTRA_KEYS = ("embedding-size", "generator-size", "mask-percent")


@dataclass(frozen=True)
class ChosenEntry:
    """An entry of the file, and what the command line says besides.

    Attributes:
        model_type: the entry's name, whose first word is the family: `bert-base-dist` is a `bert`, `debertav2-base` a
            `deberta_v2`.
        stores, validation: the token stores to train on, and the held-out ones.
        whole_word_mask, fp16_type: the original's `--do_whole_word_mask` and `--fp16_type`.
        processes_per_node: matters with `accumulation-steps` above 1: the micro-batch of a process is then its share of
            the entry's `batch-size`.
    """

    model_type: str
    stores: Sequence[Path]
    validation: Sequence[Path] = ()
    whole_word_mask: bool = False
    fp16_type: int | None = None
    processes_per_node: int = 1


def read_entry(path: Path, chosen: ChosenEntry) -> dict[str, Any]:
    """The `chosen` entry of the file `path`, as the JSON that `Parameters.from_dict` reads. Where there is no
    parameter.json, the one that comes with this family is read.

    Raises:
        UserError: there is no such entry; keys are missing, unknown, wrong or not supported (all are listed).
    """
    if str(path) == SHIPPED.name and not path.exists():
        path = SHIPPED
    entries, model_type = read_settings(path), chosen.model_type
    if model_type not in entries:
        raise UserError(f"{path.name}: --model-type {model_type}: no such entry{nearest(model_type, entries)}")
    raw = entries[model_type]
    where = f"{path.name}: {model_type}"
    if not isinstance(raw, Mapping):
        raise UserError(f"{where}: expected an object, got {short_json(raw)}")
    family = model_type.partition("-")[0]
    family = RENAMED.get(family, family)
    start = read_start_folders(raw, where, family)
    try:
        entry = LanguagePretrainingEntry.model_validate(dict(start.entry if start else raw))
    except ValidationError as error:
        raise UserError(
            "\n".join(f"{path.name}: {line}" for line in explain(error, LanguagePretrainingEntry, model_type))
        ) from None
    _refuse_unsupported(raw, where, family, started=start is not None)

    precision = _precision(entry, raw, where, chosen.fp16_type)
    batch_size = {node: rows * entry.accumulation_steps for node, rows in entry.batch_size.items()}
    micro = None
    if entry.accumulation_steps > 1:
        micro = -(-max(entry.batch_size.values()) // chosen.processes_per_node)
    return {
        "data": {
            "train": [{"store": str(store), "weight": 1.0} for store in chosen.stores],
            "validation": [str(store) for store in chosen.validation],
            "sequence_length": entry.sequence_length,
        },
        "architecture": start.architecture if start else _architecture(entry, family),
        "objective": _objective(entry, family, chosen.whole_word_mask, start),
        "optimizer": {
            "type": "adamw",
            "learning_rate": entry.learning_rate,
            "weight_decay": 0.01,
            "betas": [0.9, 0.98 if family == "roberta" else 0.999],
            "eps": 1e-6,
            "bias_correction": False,
        },
        "schedule": {"type": "linear", "warmup_steps": entry.warmup_steps},
        "batch_size": batch_size,
        "micro_batch_size": micro,
        "max_steps": entry.train_steps,
        "max_grad_norm": 1.0,
        "precision": precision,
        "checkpoint": {"save_steps": entry.save_steps, "keep": 20},
        "evaluation": {"steps": entry.save_steps} if chosen.validation else None,
        "logging_steps": entry.logging_steps,
        "trackers": [{"type": "tensorboard"}],
        "seed": 42,
        "start_from": start.start_from if start else None,
        "frozen_layers": entry.flozen_layers,
    }


def _refuse_unsupported(raw: Mapping[str, Any], where: str, family: str, *, started: bool) -> None:
    if family == "electra":
        missing = [key for key in ELECTRA_KEYS if key not in raw and not started]
        if missing:
            raise UserError("\n".join(f"{where}.{key}: missing; an electra entry needs it" for key in missing))
    else:
        for key in ELECTRA_KEYS[:2]:
            if key in raw:
                raise UserError(f"{where}.{key}: has an effect only in electra entries; remove it")


def _precision(entry: LanguagePretrainingEntry, raw: Mapping[str, Any], where: str, fp16_type: int | None) -> str:
    """`fp32`, `bf16` or, for fp16-type 1 to 3, `fp16`. The option overrides the entry. Raises UserError for bf16 and
    fp16 at once."""
    chosen = entry.fp16_type if fp16_type is None else fp16_type
    key = "fp16-type" if fp16_type is None else "--fp16_type"
    if chosen and entry.bf16:
        raise UserError(f"{where}: bf16 true and {key} {chosen} exclude each other; remove one")
    if chosen:
        return "fp16"
    return "bf16" if entry.bf16 else "fp32"


def _architecture(entry: LanguagePretrainingEntry, family: str) -> dict[str, Any]:
    stated = entry.model_dump(by_alias=True, exclude_none=True)
    sizes = {name: stated[key] for key, name in SIZES.items() if key in stated}
    further: dict[str, dict[str, Any]] = {
        "roberta": {"type_vocab_size": 2},  # its key for another number is misspelt
        "deberta": {"pos_att_type": ["p2c", "c2p"]},
        "deberta_v2": {"position_buckets": entry.sequence_length // 2, "share_att_key": False},
    }
    return {"type": family, **sizes, "max_position_embeddings": entry.sequence_length, **further.get(family, {})}


def _objective(
    entry: LanguagePretrainingEntry, family: str, whole_word_mask: bool, start: StartFolders | None
) -> dict[str, Any]:
    """Masked tokens with next-sentence pairs for bert, replaced tokens for electra, masked tokens alone for others."""
    objective: dict[str, Any] = {
        "type": "replaced_token" if family == "electra" else "masked_lm",
        "mlm_probability": 0.15 if entry.mask_percent is None else entry.mask_percent / 100,
        "whole_word_mask": whole_word_mask,
    }
    if family == "electra":
        if start is not None and entry.generator_size is None:
            objective["generator"] = start.generator
        else:
            objective["generator_size"] = entry.generator_size
    if family == "bert":
        objective |= {"layout": "pairs", "next_sentence": True}
    return objective
