"""`terakoya upload`: tries a model, writes its card, pushes it to the Hub and loads it back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from terakoya.commands.guidance import next_command
from terakoya_hub.options import UploadOptions


def command(options: UploadOptions) -> None:
    """Push a model with its tokenizer and a card to the Hub, and load it back.

    The token is read from HF_TOKEN in the environment or from `hf auth login`; HF_ENDPOINT names another server.
    """
    from terakoya.conversion.elsewhere import elsewhere
    from terakoya.log import new_console
    from terakoya_hub.upload import upload_model

    console = new_console()
    with elsewhere() as process:
        done = upload_model(
            replace(
                options,
                try_model=partial(_try, options),
                report=lambda text: console.print(text, markup=False, soft_wrap=True),
                process=process,
            )
        )
    if done.folder is None:
        console.print(done.address, soft_wrap=True)
        for sub, kind in done.models.items():
            subfolder = f', subfolder="{sub}"' if sub else ""
            text = f'others load it with {kind}.from_pretrained("{options.name}"{subfolder})'
            console.print(text, markup=False, soft_wrap=True)
        return
    console.print(f"wrote the files that would be pushed to {done.folder}", soft_wrap=True)
    given: dict[str, object] = options.of_the_card() | {
        "--only": options.only, "--public": options.public, "--trust-remote-code": options.trust_remote_code,
        "--also": options.also, "--prompt": options.prompt,
    }  # fmt: skip
    missing = [each for each in ("--run", "--prompt", "--license", "--dataset", "--dataset-license") if not given[each]]
    missing += [] if options.authors or options.citation else ["--author"]
    if not options.languages and "\nlanguage:" not in (done.folder / "README.md").read_text(encoding="utf-8"):
        missing.append("--language")
    if missing:
        text = f"the card says nothing yet of what these options tell: {', '.join(missing)}"
        console.print(text, markup=False, soft_wrap=True)
    words = [word for option, value in given.items() if value for word in _words(option, value)]
    next_command.show("upload", options.source, "--name", options.name, *words)


def _words(option: str, value: object) -> list[str]:
    """Returns the words of the command line that give `option` its value, or each of its values."""
    values = value if isinstance(value, list | tuple) else [value]
    return [option] if value is True else [word for each in values for word in (option, str(each))]


def _try(options: UploadOptions, folder: Path, prompt: str) -> str:
    import contextlib
    import io

    from terakoya_inference.commands.try_model import TryOptions, try_texts

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try_texts(TryOptions(folder=folder, texts=[prompt], trust_remote_code=options.trust_remote_code))
    return output.getvalue()
