"""Pages of the documentation: readers follow them, every block says what a reader does with it, translations agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_commands import ROOT
from followed_pages import BLOCK, Reader, blocks_of
from site_source import ELSEWHERE

from terakoya import plugins
from terakoya.config.parameters import Parameters
from terakoya.config.presets import preset_names
from terakoya.json_settings import without_notes
from terakoya.runs import metrics
from terakoya_cleaning.reading import load_steps
from terakoya_pipeline.run import Pipeline

DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
TRANSLATIONS = ["README.ja.md", *(page for page in DOCS if page.endswith(".ja.md"))]
PAGES = [page for page in dict.fromkeys([*DOCS, *ELSEWHERE]) if page not in TRANSLATIONS]

QUICK = ["how-to/japanese-messages", "how-to/cleaning", "how-to/corpus-report", "how-to/filters"]
"""Pages that a reader follows in every run of the tests."""

READERS = [
    ["README"],
    ["tutorials/japanese-bert", "tutorials/continued-pretraining", "how-to/new-vocabulary", "how-to/growth",
     "tutorials/slurm", "how-to/pbs-and-grid-engine"],
    ["tutorials/electra"],
    ["tutorials/gpt", "tutorials/instruction-tuning", "how-to/lora", "how-to/megatron"],
    ["tutorials/new-architecture"],
    ["how-to/tokenizers", "how-to/stores", "how-to/corpora", "how-to/parameters", "how-to/publish", "how-to/quality",
     "how-to/names",
     "how-to/families", "how-to/watch", "how-to/events", "how-to/branches",
     "how-to/phases", "how-to/object-stores"],
    ["how-to/tokenizers", "how-to/stores", "how-to/processes-and-nodes", "how-to/prepare-on-a-cluster"],
    ["how-to/estimate"],
    ["how-to/pipelines"],
    ["how-to/python"],
]  # fmt: skip
"""Pages that a reader follows one after the other, in one folder."""

FOLLOWED_ELSEWHERE = {
    "plugins/README.md": "tests/core/plugins/test_plugin_examples.py",
    "docs/reference/plugins.md": "tests/core/plugins/test_plugin_examples.py",
    "plugins/terakoya_clusters/launchers/sagemaker/SAGEMAKER.md": "tests/families/clusters/test_sagemaker.py",
}


def path_of(name: str) -> str:
    return f"{name}.md" if name == "README" else f"docs/{name}.md"


def follow(pages: list[str], folder: Path, python: Path) -> Reader:
    folder.mkdir()
    for name in ("core", "parameters"):
        (folder / name).symlink_to(ROOT / name)
    reader = Reader(folder, python)
    for page in pages:
        reader.follow(path_of(page))
    assert reader.printed
    return reader


def test_a_reader_follows_the_pages_whose_commands_take_seconds(tmp_path: Path, warm_python: Path) -> None:
    printed = "".join(follow(QUICK, tmp_path / "reader", warm_python).printed.values())
    assert "使い方" in printed and "work/store.val: " in printed


@pytest.mark.nightly
@pytest.mark.parametrize("pages", READERS, ids=lambda pages: pages[-1])
def test_a_reader_follows(pages: list[str], tmp_path: Path, warm_python: Path) -> None:
    reader = follow(pages, tmp_path / "reader", warm_python)
    if "how-to/publish" in pages:
        card = (reader.folder / "work" / "measured" / "README.md").read_text(encoding="utf-8")
        assert card.count("held_out.jsonl.gz") > 1
    if "tutorials/electra" in pages:
        records = metrics.read(reader.folder / "work/electra").records
        learned = [each["discriminator_auc"] for each in records if "discriminator_auc" in each]
        assert learned[0] < 0.6 < 0.7 < learned[-1]


def test_every_page_with_something_to_do_has_a_reader() -> None:
    something = {page for page in PAGES if any(block.kind in ("file", "run", "python") for block in blocks_of(page))}
    followed = {path_of(page) for pages in [QUICK, *READERS] for page in pages}
    assert something == followed | (something & set(FOLLOWED_ELSEWHERE))
    assert all((ROOT / file).is_file() for file in FOLLOWED_ELSEWHERE.values())


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_a_reader_does_with_it(page: str) -> None:
    for block in blocks_of(page):
        assert block.kind or block.language in ("text", "json", "yaml"), f"{page}: say what it is: {block.content}"
        if block.kind == "not run":
            assert block.what, f"{page}: say why: {block.content}"
            for file in re.findall(r"\b(?:tests|docs)/[\w/.-]+", block.what):
                assert (ROOT / file).exists(), f"{page}: {file}"


def check_settings(value: Any, source: str) -> None:
    """Fails unless `value` is a list of cleaning steps, a pipeline, or parameters or a part of them."""
    if isinstance(value, list):
        assert load_steps(value)
    elif value.keys() & {"corpus", "corpora"}:
        assert str(Pipeline.model_validate(value).parameters) in preset_names()
    else:
        if value.get("architecture", {}).get("type", "bert") not in plugins.registry().names("architectures"):
            value = {name: part for name, part in value.items() if name != "architecture"}  # the page writes its plugin
        preset = json.loads((ROOT / "parameters" / "tiny_bert.json").read_text(encoding="utf-8"))
        preset |= {"max_steps": None} if value.keys() & {"epochs", "max_tokens"} else {}
        preset |= {"start_from": "work/model"} if "lora" in value else {}
        Parameters.from_dict(without_notes({**preset, **value}), source=source)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in FOLLOWED_ELSEWHERE])
def test_settings_are_accepted(page: str) -> None:
    for block in blocks_of(page):
        if block.language in ("json", "yaml") and not block.what.endswith(".jsonl"):
            check_settings((json.loads if block.language == "json" else yaml.safe_load)(block.content), page)
    for name, value in settings_within_sentences(page):
        check_settings({name: value}, f"{page}: {name}")


def settings_within_sentences(page: str) -> Iterator[tuple[str, Any]]:
    """Keys of parameters and their values where a sentence has them, such as `"lora": {"r": 16}`."""
    prose = BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for name, text in re.findall(r'`"(\w+)": ([^`]+)`', prose):
        if name in Parameters.model_fields and "..." not in text.replace('"..."', ""):
            yield name, json.loads(text)


def test_sentences_have_settings() -> None:
    found = {name for page in PAGES for name, _ in settings_within_sentences(page)}
    assert {"lora", "profile", "trackers", "batch_size", "checkpoint"} <= found, found


@pytest.mark.parametrize("page", TRANSLATIONS)
def test_a_translation_has_the_same_blocks(page: str) -> None:
    english, japanese = (list(shared_lines(name)) for name in (page.replace(".ja.", "."), page))
    assert english == japanese
    assert not any(block.kind for block in blocks_of(page)), "the English page says what a reader does"


def shared_lines(page: str) -> Iterator[str]:
    """The lines of blocks that no translation changes: commands of terakoya without comments, programs, files."""
    for block in sorted(blocks_of(page), key=lambda block: block.language):
        for line in block.content.splitlines():
            if block.language not in ("", "text"):
                yield line
            elif line.startswith("terakoya "):
                yield line.split(" #")[0].rstrip()
