"""What `terakoya prepare` needs to know of conversations: their template, and a tokenizer that lies elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from terakoya.errors import UserError

if TYPE_CHECKING:
    from terakoya.components import Tokenizer
    from terakoya.preparation.chat_template import ChatTemplate


def check(*, cleaning: bool, held_out: bool) -> None:
    """Raises UserError for options of plain text that conversations do not have."""
    if cleaning or held_out:
        raise UserError(
            "--clean, --held-out: cleaning steps look at plain text, conversations have turns; leave them out, and set "
            "conversations aside with data.split or `terakoya store split`"
        )


def template_of(
    tokenizer: Tokenizer, folder: Path, template: str | None, *, conversations: bool
) -> ChatTemplate | None:
    """The template that conversations are written with, None for plain text.

    Raises:
        UserError: a template without conversations, and as `terakoya.preparation.chat_template.find_template`.
    """
    if not conversations:
        if template is not None:
            raise UserError(f"--template {template}: is for conversations; say --conversations, or leave it out")
        return None
    from terakoya.preparation.chat_template import find_template

    return find_template(template, tokenizer.load(folder), folder)


def tokenizer_folder(folder: Path) -> Path:
    """`folder`, or where the Hugging Face Hub's files of that name lie on this machine.

    Raises:
        UserError: it is neither here nor there, though it may be a name on the Hub.
    """
    from terakoya.toolkit.hub_cache import find_snapshot, is_hub_name

    name = str(folder)
    if folder.exists() or not is_hub_name(name):
        return folder
    found = find_snapshot(name)
    if found is None:
        raise UserError(
            f"{name}: expected a tokenizer's folder, found none; make one with `terakoya tokenizer train`. If it is a "
            f"name on the Hugging Face Hub: nothing is downloaded here; fetch it first: hf download {name}"
        )
    return found
