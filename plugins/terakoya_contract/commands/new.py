"""`terakoya plugins new`: writes a working plugin with its test, as a starting point."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from terakoya.errors import UserError, nearest
from terakoya.places import check_local

TEMPLATES = Path(__file__).resolve().parent / "templates"
SINGULAR = (
    "tokenizer", "word_finder", "cleaning_step", "architecture", "objective", "optimizer", "schedule", "exporter",
    "importer", "tracker", "event", "launcher", "initializer",
)  # fmt: skip
"""The singulars of `components.KINDS`, which is not imported here: `terakoya --help` must stay quick."""

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

# Installing this package installs the plugin. The value is a module, or a package of plugins.
[project.entry-points.terakoya]
{name} = "terakoya_{name}"

[tool.hatch.build.targets.wheel]
only-include = ["terakoya_{name}.py"]
"""


def new(name: str, kind: str, out: Path, *, package: bool = False) -> list[Path]:
    """Writes a plugin of `kind` (a singular) called `name`, and its test, into the folder `out`; returns the files.

    With `package` the files are in a folder of their own that pip can install.

    Raises:
        UserError: there is no such kind, the name is not a Python name or is taken, or a file exists already.
    """
    if kind not in SINGULAR:
        raise UserError(f"--kind {kind}: there is no such kind{nearest(kind, SINGULAR)}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(
            f'"{name}": expected lower-case letters, digits and _, beginning with a letter, such as my_{kind}'
        )
    from terakoya.plugins import registry

    check_local(out, "the folder to write into")
    if name in registry().names(f"{kind}s"):
        raise UserError(f"{kind} {name}: exists already, see `terakoya plugins list`; choose another name")
    folder, module = (out / f"terakoya-{name.replace('_', '-')}", f"terakoya_{name}") if package else (out, name)
    files = {
        folder / f"{module}.py": _fill(TEMPLATES / f"{kind}.py", name, module),
        folder / f"test_{module}.py": _fill(TEMPLATES / f"try_{kind}.py", name, module),
    }
    if package:
        text = PYPROJECT.format(name=name, dashed=name.replace("_", "-"), kind=kind)
        files = {folder / "pyproject.toml": text, **files}
    for file in files:
        if file.exists():
            raise UserError(f"{file}: exists already; remove it, or choose another name or --out")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    return list(files)


def _fill(template: Path, name: str, module: str) -> str:
    """Returns the template with the plugin's name in place of `example`."""
    camel = "".join(word.capitalize() for word in name.split("_"))
    text = template.read_text(encoding="utf-8")
    return (
        text.replace("terakoya_contract.commands.templates.example", module)
        .replace("Example", camel)
        .replace("example", name)
    )


def command(
    name: Annotated[str, typer.Argument(help="The component's name in the parameter JSON, such as my_model.")],
    kind: Annotated[str, typer.Option(help=f"One of {', '.join(SINGULAR)}.")],
    out: Annotated[Path, typer.Option(help="The folder to write into.")] = Path(),
    package: Annotated[
        bool, typer.Option("--package", help="Write a package that pip can install, in a folder of its own.")
    ] = False,
) -> None:
    """Write a working plugin with its test, as a starting point for your own."""
    from rich.text import Text

    from terakoya.log import console, translated

    files = new(name, kind, out, package=package)
    for file in files:
        console().print(f"wrote {file}", markup=False, soft_wrap=True)
    plugin, test = files[-2:]
    console().print("\nnext steps:")
    steps = [
        (f"terakoya plugins check {plugin}", "check it against the requirements of its kind"),
        (f"python -m pytest {test}", "run its test"),
        (f"terakoya --plugin {plugin} plugins show {name}", "show its settings; every command takes --plugin"),
    ]
    if package:
        steps.append((f"pip install -e {plugin.parent}", "install it; --plugin is then not needed"))
    width = max(len(step) for step, _ in steps)
    for step, why in steps:
        console().print(Text(f"  {step:<{width}}  # {translated(why)}"), soft_wrap=True)
