"""The package: its functions, its folders, its types."""

import functools
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import terakoya
from terakoya.version import find_commit

CORE = Path(terakoya.__file__).parent
PLUGINS = CORE.parents[1] / "plugins"
PACKAGES = [each.parent for each in PLUGINS.glob("terakoya_*/__init__.py")]
"""The bundled plugins and the families."""


@pytest.mark.parametrize("name", ["train_tokenizer", "prepare", "train", "export", "fill_mask", "find_replaced"])
def test_what_the_command_line_does_is_a_function(name: str) -> None:
    function = getattr(terakoya, name)
    assert inspect.isfunction(function) and function.__name__ == name and function.__doc__


def test_the_commit_of_the_code_is_known_in_a_clone_alone(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(
            ["git", "-C", tmp_path, *names, *words], check=True, capture_output=True, text=True
        ).stdout

    assert find_commit(tmp_path) is None
    git("init")
    (tmp_path / "version.py").write_text("1")
    (tmp_path / "own.txt").write_text("1")
    git("add", "own.txt")
    git("commit", "-m", "a project of the user's, with an environment in it")
    assert find_commit(tmp_path) is None
    git("add", "version.py")
    git("commit", "-m", "a clone")
    assert find_commit(tmp_path) == git("rev-parse", "HEAD").strip()
    (tmp_path / "version.py").write_text("2")
    assert find_commit(tmp_path) == git("rev-parse", "HEAD").strip() + "-dirty"


def test_anything_else_is_missing() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        terakoya.trian  # noqa: B018


def test_the_tree_in_the_readme_names_every_folder_and_file_of_the_core() -> None:
    tree = (CORE.parent / "README.md").read_text(encoding="utf-8").split("```")[1]
    folders = [each for folder in (CORE, CORE / "training") for each in folder.iterdir() if each.is_dir()]
    names = {f"{each.name}/" for each in folders if not each.name.startswith((".", "__"))}
    names |= {each.name for each in CORE.glob("*.py")}
    named = set(re.findall(r"^ +((?:[a-z_]+/|[a-z_]+\.py)(?:  [a-z_]+\.py)*)", tree, re.M))
    assert names <= {name for line in named for name in line.split()}, names - named


def test_every_folder_of_the_core_is_small_enough_to_read() -> None:
    folders = [CORE, *(each for each in CORE.rglob("*") if each.is_dir())]
    sizes = {str(each.relative_to(CORE)): len(list(each.glob("*.py"))) for each in folders}
    assert sizes.pop(".") <= 10
    assert {name: size for name, size in sizes.items() if size > 25} == {}


def test_every_bundled_architecture_fits_on_a_screen() -> None:
    families = (PLUGINS / "terakoya_plugins" / "architectures").glob("[a-z]*.py")
    sizes = {each.stem: len(each.read_text(encoding="utf-8").splitlines()) for each in families}
    assert len(sizes) > 10 and {name: size for name, size in sizes.items() if size > 75} == {}


PARTICIPLE = re.compile(
    r"(@(?:cached_)?property\n +)?def _*"
    r"([a-z]+ed|[a-z]+en|built|done|found|gone|held|kept|left|made|met|said|seen|sent|shown|spent|told|thought)\("
)
NO_PARTICIPLES = {
    "children",
    "embed",
    "feed",
    "hidden",
    "listen",
    "open",
    "reopen",
    "seed",
    "shorten",
    "speed",
    "translated",
    "widen",
}
"""Verbs, nouns of the field, and `translated(text)`, which reads as `sorted(values)` does."""


def test_functions_are_named_by_verbs() -> None:
    """A property may be named by what holds: `run.finished`."""
    found = set()
    for file in (*CORE.rglob("*.py"), *PLUGINS.rglob("*.py")):
        for is_property, name in PARTICIPLE.findall(file.read_text(encoding="utf-8")):
            if not is_property and name not in NO_PARTICIPLES:
                found.add(f"{file.name}: {name}")
    assert not found


def test_its_types_are_for_others_too() -> None:
    assert len(PACKAGES) > 1
    for folder in (CORE, *PACKAGES):
        assert (folder / "py.typed").is_file()


PAGES = [CORE.parent / "README.md", *sorted((CORE.parents[1] / "docs" / "design").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_page_that_the_design_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = set(re.findall(r"(?<![\w/.-])((?:[a-z_]+/)+[a-z_]+\.py)\b", text))
    homes = (CORE, CORE.parents[1], PLUGINS, *PACKAGES)
    missing = {name for name in files if not any((home / name).exists() for home in homes)}
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert not missing | {link for link in links if not (page.parent / link).exists()}


@functools.cache
def sources() -> list[str]:
    """The text of every module, the core's once."""
    return [file.read_text(encoding="utf-8") for folder in (CORE.parent, PLUGINS) for file in folder.rglob("*.py")]


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if page.name != "README.md"], ids=lambda page: page.name)
def test_every_decision_is_named_by_the_code_that_follows_it(page: Path) -> None:
    named = f"docs/design/{page.name}"
    assert any(named in text for text in sources()), named
    assert page.name in (page.parent / "README.md").read_text(encoding="utf-8")


def test_no_property_test_has_a_time_limit_for_each_example() -> None:
    """A machine that others share would fail it."""
    from hypothesis import settings

    assert settings().deadline is None and settings(max_examples=5).deadline is None
