"""Runs, token stores and corpora at addresses such as s3://bucket/run: see README.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from terakoya import hookimpl

if TYPE_CHECKING:
    from terakoya.places import Place


@hookimpl
def register_places() -> Mapping[str, Callable[[str], Place]]:
    from terakoya_places.object_place import ObjectPlace

    return {"*": ObjectPlace}
