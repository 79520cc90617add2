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
    from terakoya_hub.upload import upload

    console = new_console()
    with elsewhere() as process:
        done = upload(
            source,
            name,
            prompt=prompt,
            public=public,
            also=also or (),
            only=only,
            run=run,
            evaluations=evaluation or (),
            license=license,
            datasets=dataset or (),
            dataset_license=dataset_license,
            languages=language,
            authors=author or (),
            citation=citation,
            trust_remote_code=trust_remote_code,
            dry_run=dry_run,
            try_model=lambda folder, prompt: _try(folder, prompt, trust_remote_code=trust_remote_code),
            report=lambda text: console.print(text, markup=False, soft_wrap=True),
            process=process,
        )
    if done.folder is not None:
        console.print(f"wrote the files that would be pushed to {done.folder}", soft_wrap=True)
        given: dict[str, object] = {
            "--run": run,
            "--prompt": prompt,
            "--license": license,
            "--dataset": dataset,
            "--dataset-license": dataset_license,
        }
        given["--author"] = author or citation
        if "\nlanguage:" not in (done.folder / "README.md").read_text(encoding="utf-8"):
            given["--language"] = language
        if missing := [name for name, value in given.items() if not value]:
            text = f"the card says nothing yet of what these options tell: {', '.join(missing)}"
            console.print(text, markup=False, soft_wrap=True)
        options = ["--license", license] if license else []
        options += [word for each in dataset or () for word in ("--dataset", each)]
        options += ["--dataset-license", dataset_license] if dataset_license else []
        options += [word for each in languages for word in ("--language", each)] if (languages := language) else []
        options += [word for each in evaluation or () for word in ("--evaluation", str(each))]
        options += [word for each in author or () for word in ("--author", each)]
        options += ["--citation", str(citation)] if citation else []
        options += [*(["--run", str(run)] if run else []), *(["--only", only] if only else [])]
        options += [*(["--public"] if public else []), *(["--trust-remote-code"] if trust_remote_code else [])]
        options += [word for each in also or () for word in ("--also", str(each))]
        options += ["--prompt", prompt] if prompt else []
        next_command.show("upload", source, "--name", name, *options)
    else:
        console.print(done.address, soft_wrap=True)
        for sub, kind in done.models.items():
            subfolder = f', subfolder="{sub}"' if sub else ""
            text = f'others load it with {kind}.from_pretrained("{name}"{subfolder})'
            console.print(text, markup=False, soft_wrap=True)


def _try(folder: Path, prompt: str, *, trust_remote_code: bool) -> str:
    """Returns the output of `terakoya try` for `prompt`."""
    import contextlib
    import io

    from terakoya.commands import try_model

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try_model.try_texts(folder, [prompt], trust_remote_code=trust_remote_code)
    return output.getvalue()
