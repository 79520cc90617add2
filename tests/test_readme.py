"""The README in both languages: its commands exist, its JSON is accepted, every flag of the original is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from documented_commands import ROOT, check_command

from terakoya.config.parameters import Parameters
from terakoya.doctor.checks import check_shared_memory
from terakoya.pipeline.run import Pipeline

PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.ja.md")}
DOCUMENTS = [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "core/README.md"]

ORIGINAL_FLAGS = {
    "train_tokenizer.py": [
        "--input_file", "--model_dir", "--intermediate_dir", "--num_files", "--mecab_dic_type", "--tokenizer_type",
        "--vocab_size", "--min_frequency", "--limit_alphabet", "--num_unused_tokens",
    ],
    "run_pretraining.py": [
        "--input_file", "--tokenizer_dir", "--model_dir", "--parameter_file", "--model_type", "--fp16_type",
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


def _code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.S | re.M)


def _commands(page: str) -> list[str]:
    """Every `terakoya ...` in code: lines of blocks, `-m terakoya` of other launchers, and inline."""
    found = []
    for block in _code_blocks(page, ""):
        lines = block.replace("\\\n", " ").splitlines()
        found += [line for line in lines if line.startswith("terakoya ")]
        found += ["terakoya " + line.split("-m terakoya ")[1].rstrip("'") for line in lines if "-m terakoya " in line]
    prose = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    return found + [inline for inline in re.findall(r"`([^`\n]+)`", prose) if inline.startswith("terakoya ")]


@pytest.mark.parametrize("name", [*PAGES, "core/README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_command_exists(name: str) -> None:
    commands = _commands((ROOT / name).read_text(encoding="utf-8"))
    assert len(commands) > 15 or name not in PAGES
    for text in commands:
        for verb in re.split(r"\|", text) if "|" in text and "--" not in text else [text]:
            words = text.split()
            check_command(verb if verb.startswith("terakoya") else " ".join([*words[:2], verb]))


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


@pytest.mark.parametrize("name", PAGES)
def test_every_flag_of_the_original_is_answered(name: str) -> None:
    rows = _flag_rows(PAGES[name])
    assert {program: sorted(flags) for program, flags in rows.items()} == {
        program: sorted(flags) for program, flags in ORIGINAL_FLAGS.items()
    }


@pytest.mark.parametrize("name", PAGES)
def test_what_replaces_the_flags_exists(name: str) -> None:
    keys = 0
    for flags in _flag_rows(PAGES[name]).values():
        for answer in flags.values():
            for code in re.findall(r"`([^`]+)`", answer):
                if code.startswith("terakoya "):
                    check_command(code)
            for key in re.findall(r"(?:the key|キー) `([^`]+)`", answer):
                _assert_key(key)
                keys += 1
    assert keys >= 4


def _preset() -> dict[str, Any]:
    value: dict[str, Any] = json.loads((ROOT / "parameters" / "tiny_bert.json").read_text(encoding="utf-8"))
    return value


def _assert_key(path: str) -> None:
    """Fails unless `path` is a key of a complete parameter JSON."""
    place: Any = Parameters.from_dict(_preset(), source="tiny_bert.json").dump()
    for key in path.split("."):
        assert key in place, path
        place = place[key]


def test_the_tables_agree_in_both_languages() -> None:
    english, japanese = (_flag_rows(page) for page in PAGES.values())
    for program, flags in english.items():
        for flag, answer in flags.items():
            here, there = (re.findall(r"`(terakoya [^`]+)`", each) for each in (answer, japanese[program][flag]))
            assert here == there, f"{program} {flag}"


@pytest.mark.parametrize("name", PAGES)
def test_its_json_is_accepted(name: str) -> None:
    pipelines = re.findall(r"<!-- pipeline -->\n```json\n(.*?)```", PAGES[name], re.S)
    for text in pipelines:
        pipeline = Pipeline.model_validate_json(text)
        assert (ROOT / str(pipeline.parameters)).is_file()
    others = [json.loads(text) for text in _code_blocks(PAGES[name], "json") if text not in pipelines]
    assert pipelines
    assert others
    for value in others:
        Parameters.from_dict({**_preset(), **value}, source=name)


@pytest.mark.parametrize("name", PAGES)
def test_the_keys_it_explains_exist(name: str) -> None:
    page = PAGES[name]
    pipeline_table = page.split("```\n\n| ")[1].split("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+)`", " ".join(row.split("|")[1] for row in pipeline_table.splitlines()[2:])))
    assert named == set(Pipeline.model_fields)
    parameter_table = page.split("| `max_steps`")[1].split("\n\n")[0]
    for path in re.findall(r"^\| `([a-z_.]+)`", "| `max_steps`" + parameter_table, re.M):
        _assert_key(path)
    for layout in ("packed", "stream", "lines", "pairs"):
        assert f"`{layout}`" in parameter_table


@pytest.mark.parametrize("name", PAGES)
def test_it_explains_every_check_of_the_doctor_that_may_fail(name: str) -> None:
    source = "".join(
        (ROOT / "core" / "terakoya" / file).read_text() for file in ("doctor/checks.py", "doctor/diagnose.py")
    )
    checks = set(re.findall(r'Finding\(\s*"([^"]+)",\s*"(?:error|warning)"', source))
    assert check_shared_memory(Path("/nowhere"))[0].check in checks
    assert len(checks) >= 10
    errors = PAGES[name].split("did you mean")[1].split("\n\n")[0] + "doctor, versions: terakoya doctor"
    unexplained = {check for check in checks if f'"{check}"' not in errors}
    assert unexplained <= {"versions", "torch", "dictionaries", "plugins"}, unexplained


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link
