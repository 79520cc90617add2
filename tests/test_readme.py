"""READMEs and documentation: commands exist, JSON is accepted, links lead somewhere, every page is on the site."""

from __future__ import annotations

import itertools
import json
import posixpath
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_commands import ROOT, check_command, verbs
from site_source import COMMANDS, ELSEWHERE, assemble, join_lines, rewrite_links, site_paths

from terakoya import plugins
from terakoya.config.other_names import find_equivalent
from terakoya.config.parameters import Parameters, all_key_paths
from terakoya.config.presets import preset_names
from terakoya.json_settings import apply_overrides, without_notes
from terakoya_checks.machine import check_shared_memory
from terakoya_launch.scripts import FINAL_EXIT_CODES
from terakoya_pipeline.run import Pipeline

READMES = ["README.md", "README.ja.md"]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = [*READMES, *DOCS, *(page for page in ELSEWHERE if page not in READMES)]
COMING_FROM = [page for page in DOCS if page.startswith("docs/coming-from/") and "language-pretraining" not in page]

ORIGINAL_FLAGS = {
    "train_tokenizer.py": [
        "--input_file", "--model_dir", "--intermediate_dir", "--num_files", "--word_tokenizer", "--mecab_dic",
        "--mecab_dic_type", "--tokenizer_type",
        "--vocab_size", "--min_frequency", "--limit_alphabet", "--num_unused_tokens",
    ],
    "create_datasets.py": [
        "--input_file", "--tokenizer_name_or_path", "--word_tokenizer_type", "--subword_tokenizer_type", "--mecab_dic",
        "--load_from_hub", "--input_corpus", "--max_length", "--mask_style",
    ],
    "run_pretraining.py": [
        "--input_file", "--dataset_dir", "--tokenizer_dir", "--tokenizer_name_or_path", "--word_tokenizer_type",
        "--subword_tokenizer_type", "--mecab_dic", "--use_deepspeed",
        "--model_dir", "--parameter_file", "--model_type", "--fp16_type",
        "--tokenizer_type", "--mecab_dic_type", "--do_whole_word_mask", "--do_continue", "--disable_overwrite_cache",
        "--nproc_per_node", "--nnodes", "--node_rank", "--local_rank", "--master_addr", "--master_port",
        "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES",
    ],
    "extract_electra_model.py": [
        "--input_dir", "--output_dir", "--parameter_file", "--model_type", "--generator", "--discriminator",
    ],
    "parameter.json": ["batch-size", "--logdir"],
}  # fmt: skip
"""Every flag, variable and key that the original's README names, by program."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def both(page: str) -> list[str]:
    """The page and its translation."""
    return [page, page.replace(".md", ".ja.md")]


def code_blocks(page: str, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.S | re.M)
    return [content for kind, content in blocks if kind == language]


def commands_of(page: str) -> list[str]:
    """Every `terakoya ...` in code: lines of blocks, `-m terakoya` of other launchers, and inline."""
    found = []
    for block in code_blocks(page, ""):
        lines = block.replace("\\\n", " ").splitlines()
        found += [line for line in lines if line.startswith("terakoya ")]
        found += ["terakoya " + line.split("-m terakoya ")[1].rstrip("'") for line in lines if "-m terakoya " in line]
    prose = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    return found + [inline for inline in re.findall(r"`([^`\n]+)`", prose) if inline.startswith("terakoya ")]


@pytest.mark.parametrize("name", [*READMES, *DOCS, "core/README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_command_exists(name: str) -> None:
    commands = commands_of(text_of(name))
    assert len(commands) > 10 or name not in READMES
    for text in commands:
        for verb in re.split(r"\|", text) if "|" in text and "--" not in text else [text]:
            words = text.split()
            check_command(verb if verb.startswith("terakoya") else " ".join([*words[:2], verb]))


@pytest.mark.parametrize("name", [*READMES, *DOCS])
def test_settings_of_a_documented_training_are_accepted(name: str) -> None:
    """`--set` goes with the preset beside it, also in commands that no reader of a test types."""
    for text in commands_of(text_of(name)):
        words = shlex.split(text, comments=True)
        presets = [word for word in words if word in preset_names()]
        if words[1:2] == ["train"] and presets and "--set" in words:
            changes = [value for flag, value in itertools.pairwise(words) if flag == "--set"]
            preset = without_notes(json.loads(text_of(f"parameters/{presets[0]}.json")))
            Parameters.from_dict(apply_overrides(preset, changes), source=text)


def test_a_tired_person_reads_the_readme_to_its_end() -> None:
    for name in READMES:
        assert len(text_of(name).splitlines()) <= 160


def _flag_rows(page: str) -> dict[str, dict[str, str]]:
    """Program -> original flag -> what replaces it, from the table under `<!-- flags -->`."""
    table = page.split("<!-- flags -->\n")[1].split("\n\n")[0]
    rows: dict[str, dict[str, str]] = {}
    for line in table.splitlines()[2:]:
        then, now, note = (cell.strip() for cell in line.strip("|").split("|"))
        if heading := re.fullmatch(r"\*\*(\S+?)(?: .*)?\*\*", then):
            program = heading[1]
            rows[program] = {}
            continue
        for flag in re.findall(r"`([^`]+)`", then):
            assert flag not in rows[program], f"{program} {flag} stands there twice"
            rows[program][flag] = f"{now} {note}"
        assert now, line
    return rows


FLAG_PAGES = both("docs/coming-from/language-pretraining.md")


@pytest.mark.parametrize("name", FLAG_PAGES)
def test_every_flag_of_the_original_is_answered(name: str) -> None:
    rows = _flag_rows(text_of(name))
    assert {program: sorted(flags) for program, flags in rows.items()} == {
        program: sorted(flags) for program, flags in ORIGINAL_FLAGS.items()
    }


@pytest.mark.parametrize("name", FLAG_PAGES)
def test_what_replaces_the_flags_exists(name: str) -> None:
    keys = 0
    for flags in _flag_rows(text_of(name)).values():
        for answer in flags.values():
            for code in re.findall(r"`([^`]+)`", answer):
                if code.startswith("terakoya "):
                    check_command(code)
            for key in re.findall(r"(?:the key|キー) `([^`]+)`", answer):
                _assert_key(key)
                keys += 1
    assert keys >= 4


def _preset() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text_of("parameters/tiny_bert.json"))
    return value


def _assert_key(path: str) -> None:
    """Fails unless `path` is a key of a complete parameter JSON."""
    place: Any = Parameters.from_dict(_preset(), source="tiny_bert.json").dump()
    for key in path.split("."):
        assert key in place, path
        place = place[key]


def test_the_tables_agree_in_both_languages() -> None:
    english, japanese = (_flag_rows(text_of(page)) for page in FLAG_PAGES)
    for program, flags in english.items():
        for flag, answer in flags.items():
            here, there = (re.findall(r"`(terakoya [^`]+)`", each) for each in (answer, japanese[program][flag]))
            assert here == there, f"{program} {flag}"


@pytest.mark.parametrize("name", both("docs/how-to/pipelines.md"))
def test_its_table_has_every_key_of_a_pipeline(name: str) -> None:
    table = text_of(name).split("```\n\n| ")[1].split("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:])))
    assert named == set(Pipeline.model_fields)


@pytest.mark.parametrize("name", both("docs/how-to/parameters.md"))
def test_the_keys_it_explains_exist(name: str) -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", text_of(name), re.M)
    paths = {path for row in rows for path in re.findall(r"`([a-z_.]+)`", row)}
    assert {"max_steps", "max_tokens", "epochs", "spikes", "lora", "objective.layout", "data.split"} <= paths
    for path in paths:
        _assert_key(path)
    for layout in ("packed", "stream", "lines", "pairs"):
        assert f"`{layout}`" in text_of(name)


@pytest.mark.parametrize("name", both("docs/how-to/troubleshooting.md"))
def test_it_explains_every_check_of_the_doctor_that_may_fail(name: str) -> None:
    source = "".join(text_of(f"plugins/terakoya_checks/{file}") for file in ("machine.py", "diagnose.py"))
    checks = set(re.findall(r'Finding\(\s*"([^"]+)",\s*"(?:error|warning)"', source))
    assert check_shared_memory(Path("/nowhere"))[0].check in checks
    assert len(checks) >= 10
    unexplained = {check for check in checks if f'"{check}"' not in text_of(name)}
    assert unexplained <= {"versions", "torch", "dictionaries", "plugins"}, unexplained


@pytest.mark.parametrize("name", COMING_FROM)
def test_what_a_page_for_users_of_another_trainer_names_exists(name: str) -> None:
    paths = set(all_key_paths(plugins.registry()))
    answered = 0
    for line in text_of(name).splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 3 or cells[0] in ("There", "---") or cells[0].startswith("**"):
            continue
        there, here, why = cells
        if here == "**not supported**":
            for name in re.findall(r"`-{0,2}([\w-]+)", there):
                assert find_equivalent(name, paths) == ([], None), f"{line}: {find_equivalent(name, paths)}"
        for code in re.findall(r"`([^`]+)`", here):
            assert code in paths or code.startswith("terakoya "), f"{line}: {code} is no key"
        words = {word.strip() for word in re.sub(r"`[^`]+`", "", here).split(",")} - {""}
        assert words <= {"nothing", "the same", "**not supported**"} and (why or not words - {"nothing"}), line
        answered += 1
    assert answered > 20


def test_a_key_of_training_arguments_is_answered_with_the_key_of_the_table() -> None:
    page = "docs/coming-from/transformers.md"
    paths = set(all_key_paths(plugins.registry()))
    answered = 0
    for line in text_of(page).split("**TrainingArguments", 1)[1].splitlines():
        there, here = ([*line.split("|")[1:3], "", ""])[:2]
        keys = re.findall(r"`([^`]+)`", here)
        for name in re.findall(r"`([a-z]\w*)`", there) if set(keys) <= paths and "torchrun" not in there else ():
            found, sentence = find_equivalent(name, paths)
            assert set(found) & set(keys) if keys else sentence or found or "not supported" in here, f"{line}: {found}"
            answered += 1
    assert answered > 30


def anchors_of(page: str) -> set[str]:
    """The anchors of the page's headings, as GitHub and the site make them, and those that it names itself."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.S | re.M)
    titles = re.findall(r"^#{1,6} (.+)$", prose, re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    named = re.findall(r'<a id="([^"]+)"></a>', prose)
    return {re.sub(r"[^\w\- ]", "", title.strip()).replace(" ", "-") for title in plain} | set(named)


def in_japanese(page: str) -> str:
    """The path that the page's Japanese version has, or would have."""
    return page.removesuffix(".md") + ".ja.md"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", text_of(name), flags=re.S | re.M)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), file)) if file else name
        assert (ROOT / target).exists(), link
        target += "/README.md" if (ROOT / target).is_dir() else ""
        assert not anchor or anchor in anchors_of(target), link
        # on the Japanese site a page without a version of its own leads to the Japanese ones
        if anchor and not (ROOT / in_japanese(name)).exists() and (ROOT / in_japanese(target)).exists():
            assert name.endswith(".ja.md") or anchor in anchors_of(in_japanese(target)), link


def _navigation() -> list[str]:
    """The pages in the site's navigation."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)

    def walk(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        return [page for each in (value.values() if isinstance(value, dict) else value) for page in walk(each)]

    return walk(yaml.load(text_of("mkdocs.yml"), Loader)["nav"])


def test_every_page_is_in_the_navigation_once() -> None:
    places = {place for place in site_paths().values() if place.endswith(".md") and not place.endswith(".ja.md")}
    navigation = _navigation()
    assert sorted(navigation) == sorted([*places, COMMANDS]), "add the page to `nav` in mkdocs.yml"


def test_links_of_the_site() -> None:
    places = site_paths()
    text = "[a](../exit-codes.md#x) [b](../../core/README.md) [c](../../core/terakoya/log.py) ![d](../figures/road.svg)"
    assert rewrite_links(text, "docs/how-to/lora.md", places) == (
        "[a](../exit-codes.md#x) [b](../explanation/how-it-is-built.md) c ![d](../figures/road.svg)"
    )
    assert rewrite_links("[e](lora.ja.md) `[f](x)`\n\n```\n[g](y)\n```\n", "docs/how-to/corpora.ja.md", places) == (
        "[e](lora.md) `[f](x)`\n\n```\n[g](y)\n```\n"
    )
    with pytest.raises(AssertionError, match=r"nowhere\.png is not on the site"):
        rewrite_links("![h](nowhere.png)", "docs/index.md", places)


def test_a_japanese_sentence_has_no_space_at_the_end_of_a_line() -> None:
    text = "読める\nフォルダを作ります。\n- 一つ\n  目の\n\n次の GPT\nを\n```\n生\nの\n```\n終\nり\n"
    assert join_lines(text) == "読めるフォルダを作ります。\n- 一つ目の\n\n次の GPT\nを\n```\n生\nの\n```\n終り\n"


def test_the_site_has_every_page_and_no_broken_link(tmp_path: Path) -> None:
    (tmp_path / "old.md").write_text("of an earlier build", encoding="utf-8")
    written = assemble(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(written)
    assert tmp_path / "index.md" in written and tmp_path / "how-to" / "plugins.md" in written
    commands = (tmp_path / COMMANDS).read_text(encoding="utf-8")
    assert all(f"## terakoya {words}\n" in commands for words in verbs()) and "--dry-run" in commands
    for path in written:
        if path.suffix != ".md":
            continue
        prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
            assert re.match(r"https?:", link) or (path.parent / link).is_file(), f"{path.name}: {link}"


def test_the_page_of_exit_codes_says_after_which_launchers_start_again() -> None:
    table = [line for line in text_of("docs/exit-codes.md").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    said = {row[0]: row[-1] for row in rows[1:]}
    final = {code for code, answer in said.items() if answer.startswith("no")}
    assert said.pop("128 + n") == "yes; not 143"
    assert {*final, "143"} == set(FINAL_EXIT_CODES.split(" | "))
    assert all(answer.startswith(("yes", "no")) for answer in said.values()) and len(said) == 9
