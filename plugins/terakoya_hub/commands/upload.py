"""`terakoya upload`: tries a model, writes its card, pushes it to the Hub and loads it back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from terakoya.commands.guidance import next_command


def command(
    source: Annotated[Path, typer.Argument(help="RUN, a checkpoint, or an exported folder.", metavar="DIR")],
    name: Annotated[str, typer.Option(help="The repository.", metavar="ORGANISATION/NAME")],
    prompt: Annotated[
        str | None, typer.Option(help="Try the model with this text first; the card shows the text and the output.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public/--private", help="Whether everybody may read a new repository.")
    ] = False,
    also: Annotated[
        list[Path] | None,
        typer.Option(help="A file to push besides those of the model; may be repeated.", metavar="FILE"),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Upload only this one of several models: generator or discriminator.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="For an exported folder: the run that it comes from, for the card.")
    ] = None,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(help="A file of `terakoya evaluate --out`, for the card; may be repeated.", metavar="FILE"),
    ] = None,
    license: Annotated[str | None, typer.Option(help="The licence for the card, such as apache-2.0.")] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="Where the text comes from: OWNER/NAME on the Hub, or words; may be repeated."),
    ] = None,
    dataset_license: Annotated[
        str | None, typer.Option(help="The licence of the text for the card, such as cc-by-sa-4.0.")
    ] = None,
    language: Annotated[
        list[str] | None,
        typer.Option(
            help="A language for the card, such as en; may be repeated. Default: ja where the vocabulary has kana."
        ),
    ] = None,
    author: Annotated[
        list[str] | None, typer.Option(help="Who made the model, for the card's citation; may be repeated.")
    ] = None,
    citation: Annotated[
        Path | None, typer.Option(help="A file with your own BibTeX entry for the card.", metavar="FILE")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder contains.")
    ] = False,
    dry_run: Annotated[
        Path | None, typer.Option(help="Push nothing; write the files into this new folder.", metavar="FOLDER")
    ] = None,
) -> None:
    """Push a model with its tokenizer and a card to the Hub, and load it back.

    The token is read from HF_TOKEN in the environment or from `hf auth login`; HF_ENDPOINT names another server.
    """
    from terakoya.conversion.elsewhere import elsewhere
    from terakoya.log import new_console
    from terakoya_hub.options import UploadOptions
    from terakoya_hub.upload import upload_model

    console = new_console()
    with elsewhere() as process:
        options = UploadOptions(
            source, name, prompt=prompt, public=public, also=also or (), only=only, run=run,
            evaluations=evaluation or (), license=license, datasets=dataset or (), dataset_license=dataset_license,
            languages=language, authors=author or (), citation=citation, trust_remote_code=trust_remote_code,
            dry_run=dry_run, try_model=lambda folder, prompt: _try(folder, prompt, trust_remote_code=trust_remote_code),
            report=lambda text: console.print(text, markup=False, soft_wrap=True), process=process,
        )  # fmt: skip
        done = upload_model(options)
    if done.folder is None:
        console.print(done.address, soft_wrap=True)
        for sub, kind in done.models.items():
            subfolder = f', subfolder="{sub}"' if sub else ""
            text = f'others load it with {kind}.from_pretrained("{name}"{subfolder})'
            console.print(text, markup=False, soft_wrap=True)
        return
    console.print(f"wrote the files that would be pushed to {done.folder}", soft_wrap=True)
    given: dict[str, object] = {
        "--license": license, "--dataset": dataset, "--dataset-license": dataset_license, "--language": language,
        "--evaluation": evaluation, "--author": author, "--citation": citation, "--run": run, "--only": only,
        "--public": public, "--trust-remote-code": trust_remote_code, "--also": also, "--prompt": prompt,
    }  # fmt: skip
    missing = [each for each in ("--run", "--prompt", "--license", "--dataset", "--dataset-license") if not given[each]]
    missing += [] if author or citation else ["--author"]
    if not language and "\nlanguage:" not in (done.folder / "README.md").read_text(encoding="utf-8"):
        missing.append("--language")
    if missing:
        text = f"the card says nothing yet of what these options tell: {', '.join(missing)}"
        console.print(text, markup=False, soft_wrap=True)
    words = [word for option, value in given.items() if value for word in _words(option, value)]
    next_command.show("upload", source, "--name", name, *words)


def _words(option: str, value: object) -> list[str]:
    """Returns the words of the command line that give `option` its value, or each of its values."""
    values = value if isinstance(value, list) else [value]
    return [option] if value is True else [word for each in values for word in (option, str(each))]


def _try(folder: Path, prompt: str, *, trust_remote_code: bool) -> str:
    """Returns the output of `terakoya try` for `prompt`."""
    import contextlib
    import io

    from terakoya.commands import try_model

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try_model.try_texts(folder, [prompt], trust_remote_code=trust_remote_code)
    return output.getvalue()
