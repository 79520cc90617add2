"""The parameter JSON, which describes a run, as strict, typed, frozen objects.

Names are those of Transformers' configs and `TrainingArguments` wherever one exists. The components of plugins are
objects with a `type`, the name under which the registry knows them.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    ValidationError,
    field_validator,
    model_validator,
)

from terakoya import plugins
from terakoya.components import Component
from terakoya.components.progress import Length
from terakoya.config import batch_table, conflicts, file_kinds, phase_plan
from terakoya.config import lora as lora_settings
from terakoya.config.data import Data
from terakoya.config.fields import LENGTH_KEYS, ParameterFields
from terakoya.config.other_names import explain_unknown_key, key_paths
from terakoya.config.presets import find_parameters
from terakoya.errors import UserError, nearest
from terakoya.json_settings import (
    apply_overrides,
    explain,
    leaves,
    read_settings,
    refuse_secrets,
    short_json,
    value_at,
    without_notes,
)
from terakoya.plugins import Registry

COMPONENTS: Mapping[str, str] = {
    "architecture": "architectures",
    "objective": "objectives",
    "optimizer": "optimizers",
    "schedule": "schedules",
}
"""The keys that hold one component, with its kind; `trackers` holds a list of them, `events` components by name."""

RESUME_MAY_CHANGE = frozenset(
    {
        *LENGTH_KEYS,
        "max_minutes",
        "logging_steps",
        "trackers",
        "events",
        "checkpoint",
        "evaluation",
        "data.validation",
        "batch_size",
        "micro_batch_size",
        "on_lost_node",
        "data.skip_steps",
        "max_consecutive_skipped_steps",
        "spikes",
        "profile",
        "activation_checkpointing",
        "compile",
        "cuda_graphs",
        "autocast",
        "fused_kernels",
        "deterministic",
        "objective.head_positions",
        "parallel",
    }
)
"""Keys that may change when a run is resumed: length, logging, saving, evaluation, skipped steps and spikes, profiles,
parallelism, how a global batch of the same size is divided among nodes and micro-batches, and what only saves memory or
time. A key includes all keys below it."""


RANKS_MAY_DIFFER = ("trackers", "start_from.folder", "parallel.nccl")
"""Keys that may differ from process to process of a run, with those below them: what rank 0 alone reads, and what sets
variables of one machine. Stores may lie in other places, but must hold the same."""


def decides_tensors(key: str) -> bool:
    """Whether the key of parameters decides which tensors are trained beside base weights."""
    return key.partition(".")[0] == "lora" and key not in lora_settings.CHANGEABLE


def missing_base_error(error: UserError) -> UserError:
    """Returns `error`, about base weights that cannot be read, with the reason why adapters need them."""
    return UserError(
        f"{error}\nlora: a checkpoint holds only the adapters; the folder of the weights under them must be there, "
        "unchanged"
    )


class Parameters(ParameterFields):
    """The complete description of a run: the keys of `ParameterFields`, checked for conflicts."""

    @field_validator("batch_size", mode="before")
    @classmethod
    def _is_table(cls, value: Any) -> Any:
        if isinstance(value, int):
            raise ValueError(f'expected the rows of each node, got {value}; write {{"-1": {value}}}')
        return value

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        batch_table.check_table(self.batch_size)
        lora_settings.check_lora(self.lora, start_from=self.start_from, frozen_layers=self.frozen_layers)
        given = [name for name in LENGTH_KEYS if getattr(self, name) is not None]
        if len(given) != 1:
            keys = ", ".join(LENGTH_KEYS)
            if not given:
                raise ValueError(f'expected exactly one of {keys}, got none; give one, such as "max_steps": 10000')
            raise ValueError(f"expected exactly one of {keys}, got {', '.join(given)}; set the others to null")
        for problem in chain(conflicts.find_conflicts(self), phase_plan.find_problems(self)):
            raise ValueError(problem)
        assert len(self._phase_parameters) == len(self.phases)  # wrong keys of a phase are found here
        return self

    @property
    def trained_beside(self) -> str | None:
        """What is trained beside the weights of `start_from`, in words: these stay as they are in their folder, and a
        checkpoint holds what is trained alone. None where they are trained themselves."""
        if self.lora is None:
            return None
        whole = f", {', '.join(self.lora.modules_to_save)} whole" if self.lora.modules_to_save else ""
        return f"LoRA of rank {self.lora.r}{whole}"

    def untrained_problem(self, names: Sequence[str]) -> str | None:
        """Returns what is wrong with randomly initialised weights of these `names`; None where they are trained."""
        return None if self.lora is None else lora_settings.untrained_problem(self.lora, names)

    @property
    def of_phases(self) -> tuple[Self, ...]:
        """The parameters of each phase, which have no phases themselves; these parameters where the run has none."""
        return self._phase_parameters or (self,)

    def with_precision(self, precision: str) -> Self:
        """These parameters, with this `precision` where theirs is "auto". Raises UserError where others rule it out."""
        if self.precision != "auto":
            return self
        return self.from_dict({**self.dump(), "precision": precision}, source='"precision": "auto" here')

    @property
    def all_data(self) -> tuple[Data, ...]:
        """The data of each phase."""
        return tuple(each.data for each in self.of_phases)

    @property
    def at_start(self) -> Self:
        """The parameters of the first steps."""
        return self.of_phases[0]

    def built_in(self, phase: int) -> Self:
        """These parameters with the architecture that the model has in the phase of this number, counted from 1."""
        return self.model_copy(update={"architecture": self.of_phases[phase - 1].architecture})

    def built_at(self, manifest: Mapping[str, Any]) -> Self:
        """The same in the phase of the checkpoint with this `manifest`."""
        return self.built_in(manifest.get("phase", {"number": 1})["number"])

    @cached_property
    def _phase_parameters(self) -> tuple[Self, ...]:
        """The parameters of each phase. Raises ValueError where the keys of a phase are wrong, or in conflict."""
        return tuple(self._of_phase(number) for number in range(len(self.phases)))

    def _of_phase(self, number: int) -> Self:
        try:
            changes = phase_plan.changes_of(self.phases[number], self, number)
            return type(self)(**{**dict(self), "phases": (), **changes})
        except UserError as error:
            raise ValueError(str(error)) from None
        except ValidationError as error:
            lines = explain(error, type(self))
            raise ValueError("\n".join(f"phases.{number}.{line}" for line in lines)) from None

    def kept_checkpoints(self, steps: int) -> int:
        """Returns how many checkpoints are on disk after `steps` steps, with those that event plugins keep."""
        plugins = [plugin for plugin in self.events.values() if plugin is not None]
        return self.checkpoint.keep + sum(plugin.count_copies(steps) for plugin in plugins)

    def count_event_bytes(self, trained: int) -> int:
        """Returns the bytes that event plugins keep for `trained` weights, such as an average of them."""
        return sum(plugin.count_bytes(trained) for plugin in self.events.values() if plugin is not None)

    @property
    def length_key(self) -> str:
        """The key that sets the length of the run."""
        return next(name for name in LENGTH_KEYS if getattr(self, name) is not None)

    @classmethod
    def of(cls, given: Path | str | Mapping[str, Any] | Parameters, overrides: Sequence[str] | str = ()) -> Parameters:
        """The parameters that a program gives: a file, a preset's name, the content of a file, or parameters, with
        `overrides` on top. Raises UserError as `load`."""
        overrides = [overrides] if isinstance(overrides, str) else overrides
        if isinstance(given, Path | str):
            return cls.load(Path(given), overrides)
        if isinstance(given, Parameters) and not overrides:
            return given
        raw = given.dump() if isinstance(given, Parameters) else given
        return cls.from_dict(raw, source="parameters", overrides=overrides)

    @classmethod
    def load(
        cls,
        path: Path,
        overrides: Sequence[str] = (),
        registry: Registry | None = None,
        *,
        nodes: int | Literal["any"] | None = None,
        assumed_nodes: int | None = None,
        read: Callable[[Path], Mapping[str, Any]] | None = None,
    ) -> Self:
        """The parameters in the JSON file `path`, or of the preset of that name, with `overrides` (`a.b=value`) on top;
        `nodes` and `assumed_nodes` are those of `from_dict`. `read` reads another program's file as such JSON. Raises
        UserError with one line for each problem: file, key path, expected, got, nearest known name; and for a file of
        another kind."""
        registry = registry or plugins.registry()
        paths = all_key_paths(registry)
        path = find_parameters(path)
        raw = (read or read_settings)(path)
        try:
            return cls.from_dict(
                raw, registry, source=path.name, overrides=overrides, nodes=nodes, assumed_nodes=assumed_nodes
            )
        except UserError:
            file_kinds.refuse_other_kind(path, raw, expected=file_kinds.PARAMETERS, paths=paths)
            raise

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        registry: Registry | None = None,
        *,
        source: str,
        overrides: Sequence[str] = (),
        nodes: int | Literal["any"] | None = None,
        assumed_nodes: int | None = None,
    ) -> Self:
        """The parameters of a JSON object. Raises UserError as `load`; errors name `source` as the file.

        `nodes` is the number of nodes of a `batch_size` in the short form, which a run replaces by a table, and with
        which any other table has to agree; "any" keeps the short form, for parameters that are only shown. Where it is
        None, `assumed_nodes` is that of the short form alone.
        """
        raw = apply_overrides(without_notes(raw), overrides)
        if nodes != "any":
            raw = batch_table.for_nodes(raw, nodes or assumed_nodes, source=source)
        registry = registry or plugins.registry()
        refuse_secrets(raw, source)
        values, problems = dict(raw), []
        parts = [(key, kind, raw[key]) for key, kind in COMPONENTS.items() if key in raw]
        if isinstance(raw.get("trackers"), list):
            parts += [(f"trackers.{index}", "trackers", each) for index, each in enumerate(raw["trackers"])]
            values["trackers"] = []
        if isinstance(raw.get("events"), Mapping):
            off = [name for name, each in raw["events"].items() if each is None]
            parts += [(f"events.{name}", "events", each) for name, each in raw["events"].items() if name not in off]
            problems += [f"events.{name}: {_unknown(name, registry)}" for name in off if _unknown(name, registry)]
            values["events"] = dict.fromkeys(off)
        elif isinstance(raw.get("events"), list):  # as trackers are
            objects = [dict(each) for each in raw["events"] if isinstance(each, Mapping)]
            named = {each.pop("type", "NAME"): each for each in objects}
            problems.append(f"events: expected an object, got a list; write {short_json(named or {'NAME': {}})}")
            values["events"] = {}
        failed = []
        explain_unknown = _explain_unknown(raw, registry)
        for path, kind, value in parts:
            if kind == "events" and isinstance(value, Mapping) and "type" not in value:
                value = {"type": path.removeprefix("events."), **value}
            component = _component(value, kind, path, registry, explain_unknown)
            if isinstance(component, list):
                failed.append(path)
                problems += component
            elif kind == "trackers":
                values["trackers"].append(component)
            elif kind == "events":
                values["events"][path.removeprefix("events.")] = component
            else:
                values[path] = component
        try:
            parameters = cls.model_validate({**values, **{key: None for key in failed if key in COMPONENTS}})
            problems += _event_problems(parameters)
        except ValidationError as error:
            lines = explain(error, cls, explain_unknown=explain_unknown)
            problems += [line for line in lines if line.partition(":")[0] not in failed]
        if problems:
            raise UserError("\n".join(f"{_origin(problem, source, overrides)}: {problem}" for problem in problems))
        if isinstance(nodes, int):
            batch_table.check_nodes(parameters.batch_size, nodes)
        return parameters

    def dump(self, registry: Registry | None = None) -> dict[str, Any]:
        """The complete JSON with defaults and types; `from_dict` of it returns equal parameters."""
        registry = registry or plugins.registry()
        result = self.model_dump(mode="json")
        for key, kind in COMPONENTS.items():
            result[key] = {"type": registry.name_of(kind, type(getattr(self, key))), **result[key]}
        result["trackers"] = [
            {"type": registry.name_of("trackers", type(tracker)), **dumped}
            for tracker, dumped in zip(self.trackers, result["trackers"], strict=True)
        ]
        return result


def _origin(problem: str, source: str, overrides: Sequence[str]) -> str:
    """Returns where `problem`, which begins with its key path, comes from: the file `source`, `--set`, or both."""
    path = problem.partition(":")[0]
    given = [override.partition("=")[0] for override in overrides]
    if any(f"{path}.".startswith(f"{each}.") for each in given):
        return "--set"
    is_of_both = any(each.startswith(f"{path}.") or " " in path for each in given)  # of keys that do not go together
    return f"{source} with --set" if is_of_both else source


def _explain_unknown(raw: Mapping[str, Any], registry: Registry) -> Callable[[str], str]:
    """Returns the function that says what an unknown key of the parameters `raw` is called here, from the keys of the
    components that `raw` chooses; of all components where it chooses none."""

    @cache
    def paths() -> list[str]:
        components = _all_components(registry)
        for key, kind in COMPONENTS.items():
            value = raw.get(key)
            name = value.get("type") if isinstance(value, Mapping) else None
            if isinstance(name, str) and name in registry.names(kind):
                components[key] = [registry.component(kind, name)]
        return key_paths(ParameterFields, components)

    return lambda path: explain_unknown_key(path, paths())


def all_key_paths(registry: Registry) -> list[str]:
    """Returns the key path of every key of the parameter JSON, with those of all components."""
    events = [(f"events.{name}", registry.component("events", name)) for name in registry.names("events")]
    in_events = [path for key, plugin in events for path in (key, *(f"{key}.{each}" for each in plugin.model_fields))]
    return [*key_paths(ParameterFields, _all_components(registry)), *in_events]


def _all_components(registry: Registry) -> dict[str, list[type[Component]]]:
    """Returns the components that each key of `COMPONENTS` may hold."""
    return {key: [registry.component(kind, name) for name in registry.names(kind)] for key, kind in COMPONENTS.items()}


def _event_problems(parameters: ParameterFields) -> list[str]:
    """Returns what the event plugins of `parameters` have against their other keys."""
    problems = []
    for name, plugin in parameters.events.items():
        try:
            if plugin is not None:
                plugin.check(parameters)
        except UserError as error:
            problems.append(f"events.{name}.{error}")
    return problems


def _unknown(name: str, registry: Registry) -> str | None:
    """Returns what is wrong with the name of an event plugin that is switched off; None where it is installed."""
    names = registry.names("events")
    return None if name in names else f"event {name}: not installed{nearest(name, names)}"


def _component(
    value: Any, kind: str, path: str, registry: Registry, explain_unknown: Callable[[str], str]
) -> Component | list[str]:
    """The component that the JSON `value` describes, or a list of problems."""
    if isinstance(value, Component):
        return value
    if not isinstance(value, Mapping):
        write = f'; write {{"type": {short_json(value)}}}' if isinstance(value, str) else ""
        return [f'{path}: expected an object with a "type", got {short_json(value)}{write}']
    name = value.get("type")
    if not isinstance(name, str):
        got = f"expected a string, got {short_json(name)}" if "type" in value else "missing"
        return [f"{path}.type: {got}{nearest('', registry.names(kind))}"]
    try:
        component: type[Component] = registry.component(kind, name)
    except UserError as error:
        return [f"{path}: {error}" if kind == "events" else f"{path}.type: {error}"]
    settings = {key: inner for key, inner in value.items() if key != "type"}
    try:
        return component.model_validate_json(json.dumps(settings), strict=True)
    except ValidationError as error:
        return explain(error, component, path, explain_unknown=explain_unknown)


def resolve_length(parameters: Parameters, *, rows: int, tokens_per_row: float, global_rows: int) -> Length:
    """The length of the run: `max_steps`, the step that reaches `max_tokens`, or the rows of `epochs`. Raises UserError
    if there is no row to train on.

    `rows` is the number of rows in one epoch over all training stores, `tokens_per_row` the average number of real
    tokens in a row, `global_rows` the number of rows in one step.
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


def changed_keys(old: Parameters | Mapping[str, Any], new: Parameters | Mapping[str, Any]) -> list[str]:
    """The key paths whose values differ between `old` and `new`, sorted."""
    before, after = (dict(leaves(each.dump() if isinstance(each, Parameters) else each)) for each in (old, new))
    absent = object()
    return sorted(path for path in {*before, *after} if before.get(path, absent) != after.get(path, absent))


def whole_sections(keys: Sequence[str], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns `keys`, with the keys of a section that only one of `old` and `new` has replaced by the section's own:
    `start_from` for `start_from.folder` where one of them has `"start_from": null`."""

    def is_section(parameters: Mapping[str, Any], path: str) -> bool:
        value = value_at(parameters, path)
        return bool(value) and isinstance(value, Mapping | list)

    result: dict[str, None] = {}
    for key in keys:
        paths = [key[: match.start()] for match in re.finditer(r"\.|$", key)]
        result[next((path for path in paths if is_section(old, path) != is_section(new, path)), key)] = None
    return list(result)


def check_allowed_changes(keys: Iterable[str], parameters: Parameters, registry: Registry) -> None:
    """Raises UserError for a key of --allow-change that the parameter JSON does not have."""
    own = [path for path, _ in leaves(parameters.dump(registry))]
    sections = [path[: match.start()] for path in own for match in re.finditer(r"\.", path)]
    known = {_of_first_entry(key) for key in (*own, *sections, *all_key_paths(registry))}
    for key in keys:
        if _of_first_entry(key) not in known:  # an entry that a list had before is none of its entries now
            close = difflib.get_close_matches(key, own, n=1)
            advice = explain_unknown_key(key, own) or (
                f'; did you mean "{close[0]}"?' if close else "; `terakoya parameters show FILE` lists the keys"
            )
            raise UserError(f"--allow-change {key}: unknown key{advice}")


def _of_first_entry(path: str) -> str:
    """Returns `path` with 0 for each place in a list: `data.train.0.store` for `data.train.2.store`."""
    return re.sub(r"\.\d+(?=\.|$)", ".0", path)
