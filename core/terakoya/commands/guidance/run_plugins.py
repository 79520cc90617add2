"""The plugins that a run was started with and this command was not: how the next one loads them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terakoya.errors import UserError


def plugin_words(folder: Path) -> tuple[str, ...]:
    """Returns the options of terakoya itself that load the files and modules which `--plugin` named for the run or
    checkpoint `folder`, without those that this command has loaded."""
    from terakoya.plugins import loading
    from terakoya.plugins.run_record import shown_source

    loaded = {Path(each).name for each in os.environ.get(loading.PLUGINS_VARIABLE, "").split(os.pathsep)}
    recorded = dict.fromkeys(each.get("requested") for each in _manifest(folder).get("plugins", ()))
    needed = [each for each in recorded if each is not None and Path(each).name not in loaded]
    return tuple(word for each in needed for word in ("--plugin", shown_source(each)))


@contextmanager
def naming_missing(run: Path) -> Iterator[None]:
    """Adds to an error of the block, which reads parameters for the folder `run`, the plugins that the run there was
    trained with and this command lacks."""
    try:
        yield
    except UserError as error:
        from terakoya.plugins import registry
        from terakoya.plugins.run_record import check_plugins

        manifest = _manifest(run)
        missing = check_plugins(registry(), manifest.get("plugins", ()), manifest.get("parameters", {})).missing
        if not missing or missing[0] in str(error):
            raise
        raise UserError("\n".join([str(error), *(f"{run}: {each}" for each in missing)])) from error


def _manifest(folder: Path) -> Mapping[str, Any]:
    """Returns the manifest of a checkpoint, or of the newest one of a run; empty where there is none."""
    from terakoya.runs import files

    saved = [each.folder for each in files.find_checkpoints(folder)[-1:]]
    return files.read_manifest(saved[0] if saved else folder)
