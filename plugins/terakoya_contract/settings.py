"""Checks of every component, whatever its kind: its settings are documented, frozen, strict and plain JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from terakoya.components import KINDS, Component
from terakoya.config.meanings import descriptions
from terakoya_contract import toy
from terakoya_contract.results import Check, CheckFailed

OfKind = TypeVar("OfKind", bound=Component)


@dataclass(frozen=True)
class Case:
    """A component to check, with its registered name; the kinds add what their checks share."""

    kind: str
    name: str
    component: type[Component]

    def __str__(self) -> str:
        return f"{self.kind.removesuffix('s')} {self.name}"

    def close(self) -> None:
        """Removes the files that checks have written."""

    def settings(self) -> Component:
        """An instance at toy size. Raises CheckFailed where its defaults and `test_settings` are not enough for one."""
        try:
            return toy.settings(self.component)
        except ValidationError as error:
            missing = [".".join(map(str, each["loc"])) for each in error.errors() if each["type"] == "missing"]
            if missing:
                raise CheckFailed(
                    f"{', '.join(missing)} has no default; give it one, or set a value for tests in the class: "
                    f'test_settings: ClassVar = {{"{missing[0]}": ...}}'
                ) from error
            reasons = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise CheckFailed(
                f"cannot be built from {toy.values(self.component)}: {reasons}; fix its `test_settings`"
            ) from error

    def settings_of(self, kind: type[OfKind]) -> OfKind:
        """As `settings`, of the type `kind`."""
        settings = self.settings()
        assert isinstance(settings, kind)
        return settings


def check_docstring(case: Case) -> None:
    """Its class has a docstring."""
    text = case.component.__doc__
    if not (text or "").strip() or text == KINDS[case.kind].__doc__:
        raise CheckFailed(f'class {case.component.__name__} has no docstring; write """One sentence.""" below its name')


def check_descriptions(case: Case) -> None:
    """Each of its settings is described; sizes with Transformers' usual names need no description."""
    described = descriptions(case.component)
    bare = [name for name in case.component.model_fields if name not in described and name not in toy.SIZES]
    if bare:
        raise CheckFailed(
            f'{", ".join(bare)} has no description; write """One sentence.""" below the field, which `terakoya plugins '
            "show` prints"
        )


def check_defaults(case: Case) -> None:
    """It can be built from its defaults and the values of its `test_settings`."""
    case.settings()


def check_frozen(case: Case) -> None:
    """Its settings are frozen, so that they cannot change during a run."""
    settings = case.settings()
    if not case.component.model_config.get("frozen"):
        raise CheckFailed(
            "model_config sets frozen=False; leave that out, and keep state in the objects that the component builds"
        )
    try:
        hash(settings)
    except TypeError as error:
        raise CheckFailed(f"a setting holds a mutable value ({error}); use tuple for list, and no dict") from error


def check_unknown_keys(case: Case) -> None:
    """An unknown key is refused, so that a misspelt key is an error."""
    try:
        case.component.model_validate({**toy.values(case.component), "no_such_setting": 1})
    except ValidationError as error:
        if any(each["type"] == "extra_forbidden" for each in error.errors()):
            return
        raise
    raise CheckFailed('an unknown key is accepted silently; leave model_config as it is, with extra="forbid"')


def check_json(case: Case) -> None:
    """Its settings survive JSON, and have a JSON Schema."""
    settings = case.settings()
    restored = case.component.model_validate_json(json.dumps(settings.model_dump(mode="json")))
    if restored != settings:
        raise CheckFailed(f"written as JSON and read back its settings differ: {settings!r} became {restored!r}")
    case.component.model_json_schema()


def check_methods(case: Case) -> None:
    """It has every method that its kind requires."""
    base = KINDS[case.kind]
    detached = getattr(case.component, "detached", False)
    required = (*REQUIRED_METHODS[case.kind], *(("find_job",) if detached else ()))
    missing = [name for name in required if getattr(case.component, name).__qualname__ == f"{base.__name__}.{name}"]
    if missing:
        raise CheckFailed(f"{', '.join(missing)} missing; see terakoya.components.{base.__name__} for what to return")


REQUIRED_METHODS = {
    "tokenizers": ("train", "from_folder", "encoder", "fingerprint"),
    "word_finders": ("build", "fingerprint"),
    "architectures": ("config", "build", "hidden", "blocks"),
    "objectives": ("row_layout", "terms", "collate", "build"),
    "optimizers": ("build",),
    "schedules": ("factor",),
    "exporters": ("export",),
    "importers": ("read",),
    "trackers": ("open",),
    "events": ("start",),
    "launchers": ("plan",),
    "initializers": ("weights",),
    "cleaning_steps": (),
}
"""The methods of each kind that have no default."""

CHECKS: tuple[Check, ...] = (
    check_docstring,
    check_descriptions,
    check_defaults,
    check_frozen,
    check_unknown_keys,
    check_json,
    check_methods,
)
