"""Finding files of the Hugging Face Hub in the cache of this machine. Nothing is ever downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""NAME or ORGANISATION/NAME."""


def is_hub_name(text: str) -> bool:
    """Returns whether `text` has the form of a name on the Hub."""
    return bool(HUB_NAME.fullmatch(text)) and text not in (".", "..")


def find_snapshot(
    name: str, kind: Literal["model", "dataset"] = "model", *, revision: str | None = None
) -> Path | None:
    """Returns the folder of the files of the model or data set `name` in the Hub's cache (`HF_HOME`), where
    `hf download NAME` (`hf download NAME --repo-type dataset`) writes them; None if there are none, or none of the
    `revision`."""
    if not is_hub_name(name):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type=kind, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
