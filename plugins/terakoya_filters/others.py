"""The steps `datatrove` and `hojichar`: the filters of these libraries, by the names of their classes.

https://github.com/huggingface/datatrove, https://github.com/HojiChar/HojiChar. A filter that needs further packages or
files of its library says so itself; one that draws random numbers or compares documents is not for this.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from terakoya.components import CleaningStep
from terakoya.errors import UserError, nearest


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((str(key), _freeze(each)) for key, each in value.items())
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value


Settings = Annotated[
    tuple[tuple[str, Any], ...], BeforeValidator(_freeze), PlainSerializer(dict), WithJsonSchema({"type": "object"})
]
"""The arguments of a filter, an object in JSON."""

Judge = Callable[[str], tuple[str, bool, str]]
"""A text -> the changed text, whether it stays, and the library's own word for why not."""


class _LibraryFilter(CleaningStep):
    """A filter of a library, called by the name of its class."""

    repeats: ClassVar = True
    library: ClassVar[str]

    filter: str
    settings: Settings = ()
    """The arguments of the class."""

    @property
    def reason(self) -> str:
        """The class."""
        return self.filter

    def versions(self) -> Mapping[str, str]:
        """Implements `CleaningStep.versions`. An unknown filter or argument is told here, before the work begins."""
        self._judge  # noqa: B018 - it is made here
        return {self.library: _version(self.library, self.filter)}

    def change(self, text: str) -> str:
        return self._judge(text)[0]

    def keeps(self, text: str) -> bool:
        return self._judge(text)[1]

    def why(self, text: str) -> str:
        return self._judge(text)[2]

    @cached_property
    def _judge(self) -> Judge:
        _version(self.library, self.filter)
        return _remember_last(self._make_judge(), f"{self.library}: {self.filter}")

    def _make_judge(self) -> Judge:
        raise NotImplementedError


class Datatrove(_LibraryFilter):
    """Drops and changes documents as a filter of datatrove does."""

    library: ClassVar[str] = "datatrove"
    test_settings: ClassVar[Mapping[str, Any]] = {"filter": "RegexFilter", "settings": {"regex_exp": "ab"}}

    filter: str
    """The class of `datatrove.pipeline.filters`: "GopherQualityFilter"."""

    def _make_judge(self) -> Judge:
        made = _make("datatrove", ("datatrove.pipeline.filters",), self.filter, dict(self.settings))
        document = importlib.import_module("datatrove.data").Document

        def judge(text: str) -> tuple[str, bool, str]:
            item = document(text=text, id="")
            answer = made.filter(item) if text else True
            kept, reason = answer if isinstance(answer, tuple) else (answer, "")
            return item.text, bool(kept), str(reason or "")

        return judge


class Hojichar(_LibraryFilter):
    """Drops and changes documents as a filter of HojiChar does."""

    library: ClassVar[str] = "hojichar"
    test_settings: ClassVar[Mapping[str, Any]] = {"filter": "DocumentLengthFilter", "settings": {"min_doc_len": 3}}

    filter: str
    """The class of `hojichar.document_filters`: "DiscardBBSComments"; or of its other modules of filters."""

    def _make_judge(self) -> Judge:
        modules = ("hojichar.filters.document_filters", "hojichar.filters.language_identification")
        made = _make("hojichar", modules, self.filter, dict(self.settings))
        document = importlib.import_module("hojichar").Document

        def judge(text: str) -> tuple[str, bool, str]:
            item = made.apply(document(text))
            return item.text, not item.is_rejected, ""

        return judge


def _version(library: str, name: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"{library}: {name}: needs {library}: pip install {library}") from error


def _make(library: str, modules: tuple[str, ...], name: str, settings: Mapping[str, Any]) -> Any:
    """Returns the filter called `name` of `modules`. Raises UserError where there is none or it cannot be made."""
    found: dict[str, Any] = {}
    for module in map(importlib.import_module, modules):
        classes = inspect.getmembers(module, inspect.isclass)
        found |= {key: each for key, each in classes if hasattr(each, "filter" if library == "datatrove" else "apply")}
    if name not in found:
        raise UserError(f'{library}: filter: expected a filter of {library}, got "{name}"{nearest(name, found)}')
    try:
        known = {
            key: each for base in found[name].__mro__[:-1] for key, each in inspect.signature(base).parameters.items()
        }
        if unknown := sorted(settings.keys() - known.keys()):
            raise UserError(f'{library}: {name}: settings: unknown "{unknown[0]}"{nearest(unknown[0], known)}')
        return found[name](**settings)
    except (TypeError, ValueError, AssertionError, ImportError, OSError) as error:
        raise UserError(f"{library}: {name}: cannot be made with these settings: {error}") from error


def _remember_last(judge: Judge, name: str) -> Judge:
    """`change`, `keeps` and `why` ask about the same text: it is judged once. `name` is for a UserError where the
    filter finds a package missing only when it sees a text."""
    last: list[Any] = [None, None]

    def ask(text: str) -> tuple[str, bool, str]:
        if text != last[0]:
            try:
                last[:] = [text, judge(text)]
            except ImportError as error:
                raise UserError(f"{name}: {error}") from error
        answer: tuple[str, bool, str] = last[1]
        return answer

    return ask
