"""`terakoya plugins new`: a working plugin with its test, to change into one's own."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from terakoya.errors import UserError, nearest

TEMPLATES = Path(__file__).resolve().parent / "templates"
SINGULAR = (
    "tokenizer", "architecture", "objective", "optimizer", "schedule", "exporter", "importer", "tracker", "launcher"
)  # fmt: skip
"""Each of `components.KINDS`, which are not imported here: `terakoya --help` must not wait for them."""

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "terakoya-{dashed}"
version = "0.1.0"
description = "The {kind} {name} for terakoya."
requires-python = ">=3.11"
dependencies = ["terakoya"]

# Everyone who installs this package has the plugin; the value is a module, or a package of plugins.
[project.entry-points.terakoya]
{name} = "terakoya_{name}"

[tool.hatch.build.targets.wheel]
only-include = ["terakoya_{name}.py"]
"""


def new(name: str, kind: str, out: Path, *, package: bool = False) -> list[Path]:
    """Writes a plugin of `kind` (a singular) called `name`, and its test, into the folder `out`; returns the files.

    With `package` they lie in a folder of their own that pip installs.

    Raises:
        UserError: no such kind, a name that is no Python name, a name that is taken, or a file that is there already.
    """
    if kind not in SINGULAR:
        raise UserError(f"--kind {kind}: there is no such kind{nearest(kind, SINGULAR)}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(f'"{name}": expected small letters, digits and _, beginning with a letter, such as my_{kind}')
    from terakoya.plugins import registry

    if name in registry().names(f"{kind}s"):
        raise UserError(f"{kind} {name}: is there already, see `terakoya plugins list`; choose another name")
    folder, module = (out / f"terakoya-{name.replace('_', '-')}", f"terakoya_{name}") if package else (out, name)
    files = {
        folder / f"{module}.py": _filled(TEMPLATES / f"{kind}.py", name, module),
        folder / f"test_{module}.py": _filled(TEMPLATES / f"try_{kind}.py", name, module),
    }
    if package:
        text = PYPROJECT.format(name=name, dashed=name.replace("_", "-"), kind=kind)
        files = {folder / "pyproject.toml": text, **files}
    for file in files:
        if file.exists():
            raise UserError(f"{file}: is there already; remove it, or choose another name or --out")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    return list(files)


def _filled(template: Path, name: str, module: str) -> str:
    """The template with the plugin's name for `example`."""
    camel = "".join(word.capitalize() for word in name.split("_"))
    text = template.read_text(encoding="utf-8")
    return (
        text.replace("terakoya.commands.plugins.templates.example", module)
        .replace("Example", camel)
        .replace("example", name)
    )


def command(
    name: Annotated[str, typer.Argument(help="What it is called in the parameter JSON: my_model.")],
    kind: Annotated[str, typer.Option(help=f"One of {', '.join(SINGULAR)}.")],
    out: Annotated[Path, typer.Option(help="The folder to write into.")] = Path(),
    package: Annotated[
        bool, typer.Option("--package", help="As a package that pip installs, in a folder of its own.")
    ] = False,
) -> None:
    """Write a working plugin with its test, to change into your own."""
    from terakoya.log import console

    files = new(name, kind, out, package=package)
    for file in files:
        console().print(f"wrote {file}", markup=False, soft_wrap=True)
    plugin, test = files[-2:]
    console().print("\nwhat to do with it:")
    steps = [
        (f"terakoya plugins check {plugin}", "does it keep what its kind promises?"),
        (f"python -m pytest {test}", "its test"),
        (f"terakoya --plugin {plugin} plugins show {name}", "its settings; any command takes --plugin"),
    ]
    if package:
        steps.append((f"pip install -e {plugin.parent}", "from then on it is there without --plugin"))
    width = max(len(step) for step, _ in steps)
    for step, why in steps:
        console().print(f"  {step:<{width}}  # {why}", markup=False, soft_wrap=True)
