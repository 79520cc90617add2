"""Verbs as typer reads them: the fields of an options object that a verb takes are options of the command line."""

from __future__ import annotations

import builtins
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, cast, get_args, get_origin

import typer
from typer.models import ParameterInfo

from terakoya.errors import UserError


def as_typer_reads(function: Callable[..., None], added: Sequence[tuple[Callable[..., None], str]] = ()) -> Any:
    """Returns `function` with the parameters that typer reads: as `hookspecs.Command` says, the fields in the place of
    an options object, and behind them the options that the functions in `added` have, as `hookspecs.register_options`
    says. With each of these goes what it is called in an error. Raises UserError if an option is there twice."""
    annotations, names = inspect.get_annotations(function), getattr(function, "__globals__", {})
    kinds = {name: names.get(kind) if isinstance(kind, str) else kind for name, kind in annotations.items()}
    models = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    if not models and not added:
        return function
    fields = {name: options_of(model) for name, model in models.items()}
    parameters: dict[str, Parameter] = {}
    for each in inspect.signature(function, eval_str=True).parameters.values():
        parameters |= fields.get(each.name, {each.name: each})
    callers: list[tuple[Callable[..., None], list[str]]] = []
    for adds, where in added:
        options = inspect.signature(adds, eval_str=True).parameters.values()
        further = {each.name: each for each in options if each.kind is Parameter.KEYWORD_ONLY}
        if taken := [name for name in further if name in parameters]:
            raise UserError(f"{where}: {', '.join(taken)}: it has them already")
        parameters |= further
        callers.append((adds, list(further)))

    @functools.wraps(function)
    def run(**given: Any) -> None:
        verb = function
        for adds, options in callers:
            verb = _asking_first(adds, verb, {name: given.pop(name) for name in options})
        for name, model in models.items():
            values = {each: given.pop(each) for each in fields[name]}
            given[name] = model(**{each: value for each, value in values.items() if value is not None})
        verb(**given)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters.values()]
    )
    run.__annotations__ = {}  # typer reads those in the signature
    return run


def _asking_first(
    function: Callable[..., None], verb: Callable[..., None], options: Mapping[str, Any]
) -> Callable[..., None]:
    return lambda **arguments: function(verb, arguments, **options)


@functools.cache
def options_of(model: type) -> Mapping[str, Parameter]:
    """Returns the fields of the dataclass `model` that are options, in their order: those `Annotated` with an option or
    argument of typer, or with another dataclass, whose option of that name is meant. What typer cannot read is told in
    what it can: a `Sequence` as a list, and what the option's `parser` makes as a string. Names that only type checkers
    import are any type."""
    annotations = {}
    for base in reversed(model.__mro__):
        names = _Names(vars(builtins) | {"typer": typer} | vars(sys.modules[base.__module__]))
        for name, text in inspect.get_annotations(base).items():
            annotations[name] = eval(text, {}, names) if isinstance(text, str) else text
    found = {}
    for field in dataclasses.fields(model):
        kind, info = (*get_args(annotations[field.name]), None, None)[:2]
        if dataclasses.is_dataclass(info):
            (info,) = options_of(cast("type", info))[field.name].annotation.__metadata__
        if not isinstance(info, ParameterInfo):
            continue
        default = Parameter.empty if field.default is dataclasses.MISSING else field.default
        if get_origin(kind) is Sequence:
            kind = list[str if info.parser else get_args(kind)[0]]  # type: ignore[misc]
            kind, default = (kind, default) if default is Parameter.empty else (kind | None, None)
        elif info.parser:
            kind, default = str, default if default in (None, Parameter.empty) else str(default)
        found[field.name] = Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
        )  # fmt: skip
    return found


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return Any
