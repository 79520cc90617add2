"""Writes docs/reference/keys.md, the page with every key of every settings file: python tools/write_keys.py

The page comes from the same source as `terakoya parameters show KEY`, `parameters schema` and `plugins show`. A test
compares it with what this program writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from terakoya.config.keys import File, Group, all_groups
from terakoya.config.meanings import FIRST_RELEASE, Setting
from terakoya.plugins import Registry, load

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "keys.md"

INTRODUCTION = f"""\
# Every key

Every key of every settings file: its type, default, unit and meaning. `terakoya parameters show KEY` prints one of
them, `terakoya plugins show NAME` those of a component, also of a plugin of your own. `terakoya parameters schema` and
`terakoya parameters schema pipeline` (`cleaning`, `tokenizer`, `slurm`, ...) print JSON Schemas, with which an editor
completes and explains keys: name the schema's file in the key `"$schema"`.

A file is JSON, in which `//` and `/* */` begin comments and a comma may follow the last entry; or YAML, if its name
ends in `.yaml` or `.yml`. `N` in a key path is the number of a list's entry, from 0, and `NAME` a name of your own. A
key without a version is there since {FIRST_RELEASE}.

`tools/write_keys.py` writes this page; do not edit it.
"""

CHAPTERS: dict[File, tuple[str, str]] = {
    "parameters": (
        "Parameters of a run",
        "The file of `terakoya train`, `estimate` and `launch`; `--set KEY.PATH=VALUE` sets a value over the file's.",
    ),
    "pipeline": ("Pipelines", "The file of `terakoya run`."),
    "cleaning": (
        "Cleaning steps",
        "The list `clean` of a pipeline, or the file of `--clean`: a list, or an object with the list as `clean`.",
    ),
    "tokenizer": (
        "Tokenizers",
        "Options and the file `--settings` of `terakoya tokenizer train`, and the key `tokenizer` of a pipeline.",
    ),
    "launcher": ("Launchers", "Options and the file `--settings` of `terakoya launch NAME`."),
    "exporter": ("Export formats", "Options of `terakoya export --format NAME`."),
    "importer": ("Import formats", "Options of `terakoya import NAME`."),
    "word_finder": (
        "Word finders",
        "The key `words` of a pipeline and `terakoya prepare --words`, beside the name as `type`.",
    ),
    "command": ("Settings files of commands", "The files and `--set` of further options of commands."),
}


def page(registry: Registry) -> str:
    """Returns the page's text, of the components in `registry`."""
    groups = list(all_groups(registry))
    lines = [INTRODUCTION]
    for file, (title, use) in CHAPTERS.items():
        lines += [f"\n## {title}\n", use]
        for group in groups:
            if group.file == file:
                lines += section(group, by_key=file == "parameters")
    return "\n".join(lines) + "\n"


def section(group: Group, *, by_key: bool) -> Iterator[str]:
    """Yields the lines of a group: a heading and a table. The heading of a component begins with its key where
    `by_key`, else with its name."""
    path = group.path.removesuffix(".")
    names = [f"`{each}`" for each in ((path, group.type) if by_key else (group.type, path)) if each]
    heading = (" of type " if by_key else ": ").join(names)
    if path or group.type:
        yield f"\n### {heading}\n"
        yield cell(group.summary)
    if not group.settings:
        yield "\nIt has no keys of its own."
        return
    yield "\n| Key | Type | Default | Unit | Meaning |\n|---|---|---|---|---|"
    for setting in group.settings:
        yield row(group.path, setting)


def row(path: str, setting: Setting) -> str:
    """Returns the row of a key."""
    since = "" if setting.since == FIRST_RELEASE else f" (since {setting.since})"
    default = "required" if setting.default == "(required)" else code(setting.default)
    cells = (code(path + setting.name), cell(setting.kind), default, setting.unit, cell(setting.meaning) + since)
    return f"| {' | '.join(cells)} |"


def code(text: str) -> str:
    """Returns `text` as code in a cell."""
    return f"`{text}`".replace("|", "\\|")


def cell(text: str) -> str:
    """Returns `text` so that Markdown shows it as it is; code in it stays code."""
    parts = text.split("`")
    parts[::2] = [part.replace("[", "\\[").replace("<", "&lt;").replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def bundled() -> Registry:
    """Returns the registry with the bundled plugins alone."""
    return load((), ("third-party",))


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(bundled()), encoding="utf-8")
    print(f"wrote {PAGE}")
