"""The source of the documentation site: docs/ and the pages that stand next to the code, in one folder.

MkDocs calls `on_pre_build` before it reads the folder (mkdocs.yml, `hooks`). Pages keep links that work on a file
system; here a link to a page becomes a link within the site, and a link to a file of code becomes its text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "docs"

ELSEWHERE: Mapping[str, str] = {
    "core/README.md": "explanation/how-it-is-built.md",
    "core/ENGINES.md": "explanation/engines-table.md",
    "plugins/README.md": "how-to/plugins.md",
    "plugins/terakoya_megatron/MEGATRON_FLAGS.md": "reference/megatron-flags.md",
    "plugins/terakoya_clusters/launchers/sagemaker/SAGEMAKER.md": "how-to/sagemaker.md",
    "parameters/FROM_OTHER_TRAINERS.md": "coming-from/gpt-trainers.md",
    "tools/bench/README.md": "explanation/bench.md",
    "tools/leaderboard/README.md": "explanation/leaderboard.md",
    "tools/real_input/README.md": "explanation/real-input.md",
    "tools/simulation/README.md": "explanation/simulation.md",
    "tools/gpu/README.md": "explanation/gpu.md",
    "tools/cluster/README.md": "explanation/cluster.md",
    "tools/slurm/README.md": "explanation/slurm-cluster.md",
    "tools/grid_engine/README.md": "explanation/grid-engine-cluster.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "README.md": "",
    "README.ja.md": "",
}
"""Page next to the code -> its place on the site; "" is docs/index.md, the site's own front page."""

COMMANDS = "reference/commands.md"
"""The page with the help of every command, which is made from the program."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)|`[^`\n]+`")
"""A link or picture: `!` or nothing, its text (which may have brackets), its target. Or code, which is no link."""

STYLE = "assets/extra.css"
"""The site's style sheet, tools/site/extra.css."""

JAPANESE = "[\\u3000-\\u30ff\\u3400-\\u9fff\\uff00-\\uffef]"
LINE_END = re.compile(rf"(?<={JAPANESE})\n *(?={JAPANESE})")
"""The end of a line within a Japanese sentence, which a browser would show as a space."""

FENCE = re.compile(r"^```.*?^```$", re.S | re.M)


def site_paths() -> dict[str, str]:
    """Returns the place on the site of every page and picture, by its path in the repository."""
    places = {f"docs/{path.relative_to(ROOT / 'docs').as_posix()}": path.relative_to(ROOT / "docs").as_posix()
              for path in sorted((ROOT / "docs").rglob("*")) if path.is_file()}  # fmt: skip
    places |= {page: place or "index.md" for page, place in ELSEWHERE.items()}
    pictures = (ROOT / "tools" / "bench" / "figures").glob("*.png")
    return places | {path.relative_to(ROOT).as_posix(): f"figures/{path.name}" for path in pictures}


def join_lines(text: str) -> str:
    """Returns the text of a page in which no Japanese sentence has an end of line between two of its characters."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINE_END.sub("", text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINE_END.sub("", text[end:])])


def rewrite_links(text: str, page: str, places: Mapping[str, str]) -> str:
    """Returns the text of `page`, a path in the repository, with its links as they are on the site."""

    def rewrite(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        if target is None:
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return match[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        place = places.get(found) or places.get(f"{found}/README.md")
        if place is None:
            assert not picture, f"{page}: {target} is not on the site"
            return str(label)
        place = re.sub(r"\.ja\.md$", ".md", place)  # the page of the reader's language is found by this name
        here = posixpath.relpath(place, posixpath.dirname(places[page]) or ".")
        return f"{picture}[{label}]({here}{hash_sign}{anchor})"

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(rewrite, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(rewrite, text[end:])])


def assemble(out: Path = OUT) -> list[Path]:
    """Writes the pages and pictures of the site into `out`, removes others from it, and returns their paths.

    A file whose content is the same is left alone, so that `mkdocs serve` sees no change in it.
    """
    places = site_paths()
    written = []
    for source, place in places.items():
        if ELSEWHERE.get(source) == "":
            continue
        content = (ROOT / source).read_bytes()
        if source.endswith(".md"):
            content = join_lines(rewrite_links(content.decode("utf-8"), source, places)).encode("utf-8")
        path = out / place
        written.append(path)
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    made = {COMMANDS: commands_page().encode("utf-8"), STYLE: Path(__file__).with_name("extra.css").read_bytes()}
    for place, content in made.items():
        path = out / place
        written.append(path)
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for path in set(_files(out)) - set(written):
        path.unlink()
    return written


def commands_page() -> str:
    """Returns a page with the help of every command."""
    import typer

    from terakoya.commands.main import build_app

    parts = [
        "# Commands\n\nWhat `--help` prints, of every command. An `-h` or `--help` after a command shows the same.\n"
    ]

    def walk(command: Any, words: str) -> None:
        context = typer.Context(command, info_name=words, terminal_width=110, max_content_width=110)
        parts.append(f"## {words}\n\n```text\n{command.get_help(context).strip()}\n```\n")
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{words} {name}")

    walk(typer.main.get_command(build_app()), "terakoya")
    return "\n".join(parts)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def on_pre_build(config: Any) -> None:
    """MkDocs' event."""
    assemble(Path(config.docs_dir))


if __name__ == "__main__":
    assemble()
