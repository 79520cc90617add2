"""The family `language_pretraining`: parameter files and checkpoints of retarfi/language-pretraining. README.md says
what is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from terakoya import hookimpl

if TYPE_CHECKING:
    from terakoya.components import Importer


@hookimpl
def register_options() -> Mapping[str, Callable[..., None]]:
    """Adds `--model-type` to `train` and `parameters show`."""
    from terakoya_language_pretraining.commands import entry_options

    return {"train": entry_options.train, "parameters show": entry_options.show}


@hookimpl
def register_importers() -> Mapping[str, type[Importer]]:
    """Adds `language_pretraining`."""
    from terakoya_language_pretraining.importer import LanguagePretraining

    return {"language_pretraining": LanguagePretraining}
