"""Finding files of the Hugging Face Hub in the cache of this machine. Nothing is ever downloaded."""

from __future__ import annotations

import re
from pathlib import Path

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""NAME or ORGANISATION/NAME."""


def is_hub_name(text: str) -> bool:
    """Returns whether `text` has the form of a name on the Hub."""
    return bool(HUB_NAME.fullmatch(text)) and text not in (".", "..")


def find_snapshot(name: str) -> Path | None:
    """Returns the folder of the files of `name` in the Hub's cache (`HF_HOME`), where `hf download NAME` writes them;
    None if there are none."""
    if not is_hub_name(name):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
