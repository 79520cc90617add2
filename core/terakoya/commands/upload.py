"""`terakoya upload`: a model is tried, described, pushed to the Hub and loaded back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    source: Annotated[Path, typer.Argument(help="RUN, a checkpoint, or an exported folder.", metavar="DIR")],
    name: Annotated[str, typer.Option(help="The repository.", metavar="ORGANISATION/NAME")],
    prompt: Annotated[
        str | None, typer.Option(help="Try the model with this text first; it and the answer stand in the card.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="A new repository is private.")] = False,
    only: Annotated[
        str | None, typer.Option(help="Of several models only this one: generator or discriminator.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="For an exported folder: the run it comes from, which the card describes.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="The licence for the card, such as apache-2.0.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="A language for the card; may be repeated.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that a model of its own kind brings.")
    ] = False,
    dry_run: Annotated[
        Path | None, typer.Option(help="Write what would be pushed into this new folder.", metavar="FOLDER")
    ] = None,
) -> None:
    """Push a model with its tokenizer and a card to the Hub, and load it back. The token is HF_TOKEN in the
    environment, or that of `hf auth login`; a stand-in of the Hub is named by HF_ENDPOINT."""
    from rich.console import Console

    from terakoya.hub.upload import upload

    console = Console(highlight=False)
    done = upload(
        source,
        name,
        prompt=prompt,
        private=private,
        only=only,
        run=run,
        license=license,
        languages=language or ["ja"],
        trust_remote_code=trust_remote_code,
        dry_run=dry_run,
        ask=lambda folder, prompt: _ask(folder, prompt, trust_remote_code=trust_remote_code),
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
    )
    if done.folder is not None:
        console.print(f"wrote what would be pushed to {done.folder}", soft_wrap=True)
    else:
        console.print(done.address, soft_wrap=True)


def _ask(folder: Path, prompt: str, *, trust_remote_code: bool) -> str:
    """What `terakoya try` prints for `prompt`."""
    import contextlib
    import io

    from terakoya.commands import try_model

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try_model.command(folder, [prompt], trust_remote_code=trust_remote_code)
    return printed.getvalue()
