"""What every component promises, whatever its kind: settings that are documented, frozen, strict and plain JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pydantic import ValidationError

from terakoya.components import KINDS, Component
from terakoya.contract import toy
from terakoya.contract.findings import Check, Wrong


@dataclass(frozen=True)
class Subject:
    """A component under its registered name."""

    kind: str
    name: str
    component: type[Component]

    def __str__(self) -> str:
        return f"{self.kind.removesuffix('s')} {self.name}"

    def close(self) -> None:
        """Removes what was made on disk."""

    def settings(self) -> Component:
        """An instance at toy size. Raises Wrong where `trial` does not make one."""
        try:
            return toy.settings(self.component)
        except ValidationError as error:
            missing = [".".join(map(str, each["loc"])) for each in error.errors() if each["type"] == "missing"]
            if missing:
                raise Wrong(
                    f"{', '.join(missing)} has no default; give it one, or say in the class which value to try it "
                    f'with: trial: ClassVar = {{"{missing[0]}": ...}}'
                ) from error
            said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise Wrong(f"cannot be made from {toy.values(self.component)}: {said}; mend its `trial`") from error


def documented(subject: Subject) -> None:
    """It says in its docstring what it is."""
    text = subject.component.__doc__
    if not (text or "").strip() or text == KINDS[subject.kind].__doc__:
        raise Wrong(f'class {subject.component.__name__} has no docstring; write """One sentence.""" below its name')


def instance(subject: Subject) -> None:
    """It can be made from its defaults, or from what its `trial` says."""
    subject.settings()


def frozen(subject: Subject) -> None:
    """Its settings are frozen: a run cannot change under way."""
    settings = subject.settings()
    if not subject.component.model_config.get("frozen"):
        raise Wrong("model_config sets frozen=False; leave that out, and keep state in what the component builds")
    try:
        hash(settings)
    except TypeError as error:
        raise Wrong(f"a setting holds something that can change ({error}); use tuple for list, and no dict") from error


def strict(subject: Subject) -> None:
    """An unknown key is refused, so that a misspelt one is seen."""
    try:
        subject.component.model_validate({**toy.values(subject.component), "no_such_setting": 1})
    except ValidationError as error:
        if any(each["type"] == "extra_forbidden" for each in error.errors()):
            return
        raise
    raise Wrong('an unknown key is taken in silence; leave model_config alone, it says extra="forbid"')


def plain(subject: Subject) -> None:
    """Its settings survive JSON, and have a JSON Schema."""
    settings = subject.settings()
    again = subject.component.model_validate_json(json.dumps(settings.model_dump(mode="json")))
    if again != settings:
        raise Wrong(f"written as JSON and read again it is another: {settings!r} became {again!r}")
    subject.component.model_json_schema()


def complete(subject: Subject) -> None:
    """Every method that its kind needs is there."""
    base = KINDS[subject.kind]
    goes_on = getattr(subject.component, "jobs_go_on", False)
    needed = (*NEEDED[subject.kind], *(("submitted",) if goes_on else ()))
    missing = [name for name in needed if getattr(subject.component, name).__qualname__ == f"{base.__name__}.{name}"]
    if missing:
        raise Wrong(f"{', '.join(missing)} missing; see terakoya.components.{base.__name__} for what to return")


NEEDED = {
    "tokenizers": ("train", "from_folder", "encoder", "fingerprint"),
    "architectures": ("config", "build", "hidden", "blocks"),
    "objectives": ("row_layout", "terms", "collate", "build", "exports"),
    "optimizers": ("build",),
    "schedules": ("factor",),
    "exporters": ("export",),
    "importers": ("read",),
    "trackers": ("open",),
    "launchers": ("plan",),
}
"""The methods of each kind that have no default."""

CHECKS: tuple[Check, ...] = (documented, instance, frozen, strict, plain, complete)
