"""Lists of cleaning steps, of plugins too, are read from JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from terakoya.components import CleaningStep
from terakoya.corpus.cleaning import StepsOrFile
from terakoya.errors import UserError, nearest
from terakoya.json_settings import NOTES, explain, read_value, short_json
from terakoya.plugins import registry


@dataclass(frozen=True)
class NamedStep:
    """A step by its `type` and its settings as JSON. Only these are pickled: a process loads plugins first."""

    type: str
    settings: str

    @cached_property
    def step(self) -> CleaningStep:
        """The component."""
        component: type[CleaningStep] = registry().component("cleaning_steps", self.type)
        return component.model_validate_json(self.settings)

    @property
    def name(self) -> str:
        """The name under which the documents that it drops are counted."""
        return f"{self.type} ({self.step.reason})" if self.step.reason else self.type

    def __getstate__(self) -> dict[str, str]:
        return {"type": self.type, "settings": self.settings}


def parse_steps(value: Any, *, source: str) -> tuple[NamedStep, ...]:
    """Returns the steps of the JSON value `value`, a list of objects that each have a `type`.

    `source` names the list in error messages: its file, or its key such as `clean` or `pipeline: corpora.wiki.clean`.

    Raises UserError with one line for each problem; each line begins with `source`.
    """
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{source}: expected a list of one cleaning step or more, got {short_json(value)}")
    prefix = f"{source}." if source.endswith("clean") else f"{source}: "
    names = registry().names("cleaning_steps")
    steps: list[NamedStep] = []
    problems: list[str] = []
    for number, settings in enumerate(value):
        kind = settings.get("type") if isinstance(settings, Mapping) else None
        if not isinstance(kind, str) or kind not in names:
            raise UserError(
                f"{prefix}{number}.type: expected one of {', '.join(names)}, got {short_json(kind)}"
                + (nearest(kind, names) if isinstance(kind, str) else "")
            )
        component = registry().component("cleaning_steps", kind)
        try:
            step = component.model_validate({key: settings[key] for key in settings if key != "type"})
            steps.append(NamedStep(kind, json.dumps(step.model_dump(mode="json"))))
        except ValidationError as error:
            problems += explain(error, component, str(number))
    if problems:
        raise UserError("\n".join(prefix + problem for problem in problems))
    types = [step.type for step in steps]
    if repeated := sorted({each.type for each in steps if types.count(each.type) > 1 and not each.step.repeats}):
        raise UserError(f"{source}: {', '.join(repeated)}: expected once, got it twice")
    if "hold_out" in types[:-1]:
        raise UserError(f"{source}: hold_out: expected as the last step, so that held-out documents are clean too")
    return tuple(steps)


def load_steps(clean: StepsOrFile, source: str = "clean") -> tuple[NamedStep, ...]:
    """Returns the steps of `clean`: a list that errors call `source`, or a file with a list or with an object
    {"clean": list}, which has a place for "$schema".

    Raises UserError for a missing file and for invalid steps, each by its number.
    """
    if not isinstance(clean, Path | str):
        return parse_steps(list(clean), source=source)
    clean = Path(clean)
    value = read_value(clean)
    if isinstance(value, Mapping) and "clean" in value and not value.keys() - {"clean", *NOTES}:
        return parse_steps(value["clean"], source=f"{clean.name}: clean")
    return parse_steps(value, source=clean.name)


def apply_steps(steps: Iterable[NamedStep], text: str) -> str:
    """Returns `text` after all of `steps`."""
    for each in steps:
        text = each.step.change(text)
    return text


def show_text(steps: Iterable[NamedStep], text: str) -> str:
    """Returns `text`, as it is before `steps`, as they allow to show it."""
    for each in steps:
        text = each.step.show(text)
    return text
