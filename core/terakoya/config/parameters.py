"""Parameters: the JSON that describes a run, as strict, typed, frozen objects.

Names are those of Transformers' configs and `TrainingArguments` wherever one exists. The parts that plugins bring are
objects with a `type`; the core asks the registry for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

from terakoya import plugins
from terakoya.components import Architecture, Component, Objective, Optimizer, Schedule, Tracker, batch_table
from terakoya.components.progress import Length
from terakoya.config import conflicts as contradictions
from terakoya.config import lora as lora_settings
from terakoya.config.data import Data, Settings
from terakoya.config.lora import LoraSettings
from terakoya.config.loss_scaling import LossScaling
from terakoya.config.parallel import Parallel
from terakoya.config.start_from import StartFrom
from terakoya.errors import UserError, nearest
from terakoya.json_settings import explain, leaves, read_json, refuse_secrets, shown, with_overrides
from terakoya.plugins import Registry

COMPONENTS: Mapping[str, str] = {
    "architecture": "architectures",
    "objective": "objectives",
    "optimizer": "optimizers",
    "schedule": "schedules",
}
"""The keys that hold one component, with its kind; `trackers` holds a list of them."""

LENGTHS = ("max_steps", "max_tokens", "epochs")

RESUME_MAY_CHANGE = frozenset(
    {
        *LENGTHS,
        "max_minutes",
        "logging_steps",
        "trackers",
        "checkpoint",
        "evaluation",
        "data.validation",
        "batch_size",
        "on_lost_node",
        "data.skip_steps",
        "activation_checkpointing",
        "parallel",
    }
)
"""What may change when a run goes on: length, logging, saving, evaluation, steps to pass over, what is kept in memory,
who computes what, and how a global batch of the same size is split among nodes. A key stands for all below it."""


class Checkpoint(Settings):
    """When to save and what to keep. The last step is always saved.

    Attributes:
        save_steps: optimizer steps between checkpoints.
        keep: how many stay.
        model: whether a checkpoint holds the model as a Transformers folder too: every one, the last of the run, none;
            null leaves it to the engine.
        async_save: whether training goes on while a checkpoint is written, from a copy of the state in host memory.
    """

    save_steps: PositiveInt = 1000
    keep: Annotated[int, Field(ge=2)] = 3
    model: Literal["every", "last", "never"] | None = None
    async_save: bool = False


class Evaluation(Settings):
    """Validation every `steps` optimizer steps over at most `batches` global batches of each validation store."""

    steps: PositiveInt
    batches: PositiveInt = 50


class Parameters(Settings):
    """Everything that describes a run.

    Attributes:
        batch_size: rows of one optimizer step on each node, by node rank or by its host's name; "-1" is the only node.
        on_lost_node: what becomes of a run that comes up, or starts anew, with fewer nodes than `batch_size` is for:
            it stops, or those who are left share the same global batch.
        micro_batch_size: rows that one process takes at once; null is its whole share.
        max_steps, max_tokens, epochs: the run's length; exactly one is given. It ends with the step that reaches
            `max_tokens`, or whose rows complete the `epochs`: of one store, 1 takes each row once.
        max_grad_norm: the bound on the gradient's norm; 0 is none.
        precision: what products are computed in; weights, their gradients and the optimizer stay fp32. fp8 takes the
            linear layers' products, the rest is bf16 then.
        loss_scaling: how fp16 scales its losses; null is torch's usual way.
        activation_checkpointing: what of a block is computed again in the backward and not kept until then: all of it,
            all but what is dear to compute (matrix products, attention), or nothing. Changes memory and time alone.
        max_minutes: save and stop after this time; null is never.
        start_from: where weights come from at step 0; null draws them. A run that goes on does not look there.
        lora: adapters that are trained in place of the weights, which stay those of `start_from`; null is none.
        frozen_layers: how many of the lowest layers keep their weights, together with the embeddings; -1 is none, 0 the
            embeddings alone.
    """

    data: Data
    architecture: SerializeAsAny[Architecture]
    objective: SerializeAsAny[Objective]
    optimizer: SerializeAsAny[Optimizer]
    schedule: SerializeAsAny[Schedule]
    batch_size: dict[str, int]
    on_lost_node: Literal["stop", "redistribute"] = "stop"
    micro_batch_size: PositiveInt | None = None
    max_steps: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    max_grad_norm: NonNegativeFloat = 1.0
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    loss_scaling: LossScaling | None = None
    activation_checkpointing: Literal["full", "selective"] | None = None
    parallel: Parallel = Parallel()
    attention: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation | None = None
    logging_steps: PositiveInt = 10
    trackers: Annotated[tuple[SerializeAsAny[Tracker], ...], Field(strict=False)] = ()
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 42
    max_minutes: PositiveFloat | None = None
    start_from: StartFrom | None = None
    lora: LoraSettings | None = None
    frozen_layers: Annotated[int, Field(ge=-1)] = -1

    @field_validator("batch_size", mode="before")
    @classmethod
    def _is_table(cls, value: Any) -> Any:
        if isinstance(value, int):
            raise ValueError(f'expected the rows of each node, got {value}; write {{"-1": {value}}}')
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        batch_table.check(self.batch_size)
        lora_settings.check(
            self.lora, start_from=self.start_from, frozen_layers=self.frozen_layers, precision=self.precision
        )
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"expected exactly one of {', '.join(LENGTHS)}, got {' and '.join(given) or 'none'}"
                + ("; set the others to null" if given else "")
            )
        contradictions.check(self)
        return self

    @classmethod
    def load(cls, path: Path, overrides: Sequence[str] = (), registry: Registry | None = None) -> Self:
        """The parameters in the JSON file `path`, with `overrides` (`a.b=value`) on top.

        Raises:
            UserError: every problem on a line of its own: file, key path, expected, got, nearest known name.
        """
        return cls.from_dict(read_json(path), registry, source=path.name, overrides=overrides)

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], registry: Registry | None = None, *, source: str, overrides: Sequence[str] = ()
    ) -> Self:
        """The parameters of a JSON object. UserError as `load`; `source` is what errors name."""
        raw = with_overrides(raw, overrides)
        registry = registry or plugins.registry()
        refuse_secrets(raw, source)
        values, problems = dict(raw), []
        parts = [(key, kind, raw[key]) for key, kind in COMPONENTS.items() if key in raw]
        if isinstance(raw.get("trackers"), list):
            parts += [(f"trackers.{index}", "trackers", each) for index, each in enumerate(raw["trackers"])]
            values["trackers"] = []
        failed = []
        for path, kind, value in parts:
            component = _component(value, kind, path, registry)
            if isinstance(component, list):
                failed.append(path)
                problems += component
            elif kind == "trackers":
                values["trackers"].append(component)
            else:
                values[path] = component
        try:
            parameters = cls.model_validate({**values, **{key: None for key in failed if key in COMPONENTS}})
        except ValidationError as error:
            problems += [line for line in explain(error, cls) if line.partition(":")[0] not in failed]
        if problems:
            raise UserError("\n".join(f"{source}: {problem}" for problem in problems))
        return parameters

    def dump(self, registry: Registry | None = None) -> dict[str, Any]:
        """The complete JSON, defaults and types included; `from_dict` gives these parameters back."""
        registry = registry or plugins.registry()
        result = self.model_dump(mode="json")
        for key, kind in COMPONENTS.items():
            result[key] = {"type": registry.name_of(kind, type(getattr(self, key))), **result[key]}
        result["trackers"] = [
            {"type": registry.name_of("trackers", type(tracker)), **dumped}
            for tracker, dumped in zip(self.trackers, result["trackers"], strict=True)
        ]
        return result


def _component(value: Any, kind: str, path: str, registry: Registry) -> Component | list[str]:
    """The component that the JSON `value` describes, or what is wrong with it."""
    if isinstance(value, Component):
        return value
    if not isinstance(value, Mapping):
        return [f'{path}: expected an object with a "type", got {shown(value)}']
    name = value.get("type")
    if not isinstance(name, str):
        got = f"expected a string, got {shown(name)}" if "type" in value else "missing"
        return [f"{path}.type: {got}{nearest('', registry.names(kind))}"]
    try:
        component: type[Component] = registry.component(kind, name)
    except UserError as error:
        return [f"{path}.type: {error}"]
    settings = {key: inner for key, inner in value.items() if key != "type"}
    try:
        return component.model_validate_json(json.dumps(settings), strict=True)
    except ValidationError as error:
        return explain(error, component, path)


def resolve_length(parameters: Parameters, *, rows: int, tokens_per_row: float, global_rows: int) -> Length:
    """How long the run is: `max_steps`, the step with which `max_tokens` are reached, or the rows of `epochs`.

    `rows` are those of one epoch over all training stores, `tokens_per_row` real tokens of one on average,
    `global_rows` the rows of one step.

    Raises:
        UserError: there is no row to train on.
    """
    if rows < 1 or tokens_per_row <= 0:
        raise UserError("data.train: the stores hold no row to train on")
    if parameters.max_tokens is not None:
        steps = math.ceil(parameters.max_tokens / (global_rows * tokens_per_row))
        return Length(steps=max(1, steps), tokens=parameters.max_tokens, unit="tokens")
    total = None
    if parameters.epochs is not None:
        total = max(1, math.ceil(round(parameters.epochs * rows, 6)))
    steps = parameters.max_steps or math.ceil((total or 0) / global_rows)
    return Length(steps=steps, tokens=round((total or steps * global_rows) * tokens_per_row), rows=total)


# ---------------------------------------------------------------------------------------------------- resuming


def differences(old: Parameters | Mapping[str, Any], new: Parameters | Mapping[str, Any]) -> list[str]:
    """The key paths whose values differ, sorted."""
    before, after = (dict(leaves(each.dump() if isinstance(each, Parameters) else each)) for each in (old, new))
    absent = object()
    return sorted(path for path in {*before, *after} if before.get(path, absent) != after.get(path, absent))
