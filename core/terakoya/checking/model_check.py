"""Tries the model of a run on tensors without data, so that sizes which the model refuses are named before any work."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from terakoya.checking.fake_tensors import (
    DEPTH_FIELDS,
    KnownValues,
    fake_tensors,
    full_batch,
    number_of_layers,
    with_depth,
)
from terakoya.components import Architecture, Component
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.conflicts import find_conflicts
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.json_settings import short_json
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.attributes import replace_attribute
from terakoya.training.model.build import build_module_for_training
from terakoya.training.model.start_from import check_start_configs

LARGE = 1 << 24
"""Elements of a module that takes long to initialise. For a smaller one no row is tried: its first step does that."""
DISTANCES = (1, 2, 3, 4, 6, 8, 12, 16)
"""How far from a refused size another is looked for."""
PLAUSIBLE = 1 << 31
"""A size beyond it is not looked at further: the default is suggested."""
TRIES = 20
"""Number of sizes that are changed one after the other, before defaults are tried."""
MOST_LAYERS = 10_000
"""Ten times the layers of the deepest published Transformer (DeepNet, Wang et al., 2022, arXiv:2203.00555). Building
takes about a millisecond a layer, on tensors without data, too."""
UNTRIED = ("fake tensor", "faketensor", "meta tensor", "data pointer", "tensor subclasses", "data-dependent", "swap")
"""Words in errors about tensors without data, which say nothing of the model."""


def check_model(parameters: Parameters, vocabulary: Vocabulary, *, small_too: bool = True) -> None:
    """Builds the module of `parameters` with one layer and runs one row through it, on tensors without data: about 0.1
    seconds. Without `small_too`, a module of fewer than `LARGE` elements is only built: about 0.01 seconds. Raises
    UserError if the model refuses its sizes, or the objective the model or the vocabulary; the message names the keys,
    their values, and the nearest values that work."""
    _check_depths(parameters)
    shallow = _with_one_layer(parameters)
    error = _try(shallow, vocabulary, rows_from=0 if small_too else LARGE).error
    if error is not None:
        raise UserError(_explain(shallow, vocabulary, error)) from error


def check_memory(parameters: Parameters, vocabulary: Vocabulary, *, total: int) -> None:
    """Raises UserError if the float32 weights of the model, which every process builds whole, take more than the
    `total` bytes of this machine's memory."""
    shallow, layers = _with_one_layer(parameters), number_of_layers(parameters.architecture)
    elements = _try(shallow, vocabulary, rows_from=None).elements
    if shallow is not parameters and 4 * elements * layers > total:
        deeper = with_depth(shallow, 2)
        assert deeper is not None, "it takes another depth"
        elements += (layers - 1) * (_try(deeper, vocabulary, rows_from=None).elements - elements)
    if 4 * elements > total:
        raise UserError(
            f"architecture: the model has {elements:,} weights, which take {4 * elements / 1e9:,.0f} GB; this machine "
            f"has {total / 1e9:,.0f} GB of memory: make the model smaller, or use a machine with more memory"
        )


def _check_depths(parameters: Parameters) -> None:
    """Raises UserError for a number of layers that only building could find impossible, hours later."""
    objective = {f"objective.{name}": each for name, each in dict(parameters.objective).items()}
    for path, owner in {"architecture": parameters.architecture, **objective}.items():
        for name in (*DEPTH_FIELDS, "num_decoder_layers") if isinstance(owner, Architecture) else ():
            layers = getattr(owner, name, None)
            if isinstance(layers, int) and layers > MOST_LAYERS:
                raise UserError(f"{path}.{name}: expected at most {MOST_LAYERS:,} layers, got {layers:,}")


def check_start(parameters: Parameters, vocabulary: Vocabulary) -> None:
    """Raises UserError where the folders of `start_from` hold models of other sizes, or none. Reads no weight."""
    if parameters.start_from is not None:
        with fake_tensors(KnownValues):
            check_start_configs(parameters, build_module_for_training(parameters, vocabulary))


def _with_one_layer(parameters: Parameters) -> Parameters:
    """Returns `parameters` with models of one layer, where that changes nothing but their depth."""
    shallow = with_depth(parameters, 1)
    if shallow is None:
        return parameters
    objective = parameters.objective
    nested = {name: each for name, each in dict(objective).items() if isinstance(each, Architecture)}
    smaller = {
        name: with_depth(parameters.model_copy(update={"architecture": each}), 1) for name, each in nested.items()
    }
    update = {name: each.architecture for name, each in smaller.items() if each is not None}
    return shallow.model_copy(update={"objective": objective.model_copy(update=update)})


class _Tried(NamedTuple):
    """What was seen of a model: the error that it raised, None without one; its weights, 0 if it could not be built."""

    error: Exception | None
    elements: int


def _try(parameters: Parameters, vocabulary: Vocabulary, *, rows_from: int | None = 0) -> _Tried:
    """Builds the model of `parameters` and runs one row through it, unless the module has fewer elements than
    `rows_from`; None never tries one. Raises UserError as `build_module_for_training`."""
    elements = 0
    try:
        # torch would log the traceback of each operation that is refused
        log = logging.getLogger("torch._subclasses.fake_tensor")
        with replace_attribute(log, "disabled", True), fake_tensors(KnownValues) as values:
            module = build_module_for_training(parameters, vocabulary)
            elements = sum(each.numel() for each in module.parameters())
            if rows_from is None or elements < rows_from:
                return _Tried(None, elements)
            attention.use(module, "eager" if parameters.attention == "eager" else "sdpa")
            module.train()
            _, tensors = full_batch(parameters, vocabulary, rows=1, whole_rows=True)
            module(values.take(tensors))
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - a model, perhaps of a plugin, may raise anything
        says_nothing = isinstance(error, NotImplementedError) or any(word in str(error).lower() for word in UNTRIED)
        return _Tried(None if says_nothing or isinstance(error, MemoryError) else error, elements)
    return _Tried(None, elements)


def _explain(parameters: Parameters, vocabulary: Vocabulary, error: Exception) -> str:
    """Returns which keys of `parameters` the model refuses with `error`, and what to set instead."""
    name, reason = type(parameters.architecture).__name__, " ".join(str(error).split())[:120]
    said = f"the model says: {type(error).__name__}: {reason}"
    remedy = _remedy(parameters, vocabulary)
    if remedy is None and isinstance(error, AttributeError | NameError | ImportError):
        return f"architecture: the code of {name} fails: {type(error).__name__}: {reason}"
    if remedy is None:
        return f"architecture: {name} cannot have these settings together; begin with those of a preset ({said})"
    key, value, values = remedy
    others = " or ".join(map(short_json, values))
    return f"{key}: expected a value that {name} takes, such as {others}, got {short_json(value)} ({said})"


def _remedy(parameters: Parameters, vocabulary: Vocabulary) -> tuple[str, Any, list[Any]] | None:
    """Returns (key, value, values that work) for a key of a model or the objective of which one change suffices: to a
    near size, else to the default. Keys that are not at their defaults come first."""
    objective = dict(parameters.objective)
    owners: dict[str, Component] = {"architecture": parameters.architecture, "objective": parameters.objective}
    owners |= {f"objective.{name}": each for name, each in objective.items() if isinstance(each, Architecture)}
    fields = [
        (path, name, value, type(owner).model_fields[name].get_default(call_default_factory=True))
        for path, owner in owners.items()
        for name, value in dict(owner).items()
        if not isinstance(value, Architecture)
    ]
    fields.sort(key=lambda field: field[2] == field[3])
    sizes = [each for each in fields if each[0] != "objective" and type(each[2]) is int]

    def works(path: str, name: str, value: Any) -> bool:
        changed = _with(parameters, path, name, value)
        if changed is None:
            return False
        try:
            return _try(changed, vocabulary).error is None
        except UserError:
            return False

    def by_default(fields: Iterable[tuple[str, str, Any, Any]]) -> Iterator[tuple[str, Any, list[Any]]]:
        for path, name, value, default in fields:
            if value != default and works(path, name, default):
                yield f"{path}.{name}", value, [default]

    if first := next(by_default(each for each in fields if each not in sizes), None):
        return first
    if all(abs(value) < PLAUSIBLE for _, _, value, _ in sizes):
        near_sizes = [(distance, *size) for distance in DISTANCES for size in sizes]
        for distance, path, name, value, _ in near_sizes[:TRIES]:
            near = [each for each in (value - distance, value + distance) if works(path, name, each)]
            if near:
                return f"{path}.{name}", value, near
    return next(by_default(sizes), None)


def _with(parameters: Parameters, path: str, name: str, value: Any) -> Parameters | None:
    """Returns `parameters` with the field `name` of the component at `path` set to `value`, None if it may not be."""
    key, _, nested = path.partition(".")
    owner = getattr(parameters, key)
    try:
        if nested:
            inner = getattr(owner, nested)
            changed = owner.model_copy(update={nested: type(inner).model_validate({**dict(inner), name: value})})
        else:
            changed = type(owner).model_validate({**dict(owner), name: value})
    except ValidationError:
        return None
    result = parameters.model_copy(update={key: changed})
    return None if next(find_conflicts(result), None) else result
