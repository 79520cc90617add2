"""Every key of every settings file: found by its path, its name or a name of another trainer; schemas for editors."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from tool_modules import load_tool
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.commands.shared_options import complete_parameters
from terakoya.config.keys import all_groups, find_key
from terakoya.config.presets import preset_names, presets_folder
from terakoya.errors import UserError
from terakoya.json_settings import read_value
from terakoya.plugins import registry
from terakoya_schemas.files import schema_names, schema_of


@pytest.fixture(scope="module")
def schemas() -> dict[str, dict[str, Any]]:
    return {name: schema_of(name, registry()) for name in schema_names(registry())}


def accepts(schema: dict[str, Any], value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    ("key", "paths"),
    [
        ("max_steps", ["max_steps"]),
        ("data.train.3.weight", ["data.train.N.weight"]),
        ("corpora.wiki.weight", ["corpora.NAME.weight"]),
        ("trackers.0.entity", ["trackers.N.entity"]),
        ("events.early_stopping.patience", ["events.early_stopping.patience"]),
        ("seq_len", ["data.sequence_length"]),
        ("cpus_per_process", ["cpus_per_process"]),
    ],
)
def test_a_key_is_found_by_its_path_or_another_trainers_name(key: str, paths: list[str]) -> None:
    assert [entry.path for entry in find_key(key, registry())] == paths


def test_components_with_the_same_key_share_an_entry_and_keep_their_defaults() -> None:
    (entry,) = find_key("architecture.hidden_size", registry())
    assert entry.setting.meaning == "The width of the hidden states."
    assert entry.defaults["256"] == ["electra"] and "bert" in entry.defaults["768"]
    found = {entry.path for entry in find_key("learning_rate", registry())}
    assert found == {
        "optimizer.learning_rate", "phases.N.optimizer.learning_rate", "events.task_scores.learning_rate",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("learning_rat", "there is no such key; did you mean learning_rate"),
        ("data.sequence_lenght", "did you mean data.sequence_length"),
        ("output_dir", "the run's folder is given on the command line: --out RUN"),
        ("...", "there is no such key"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(key: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        find_key(key, registry())
    assert said in str(caught.value)


def test_the_command_prints_type_unit_default_and_meaning() -> None:
    done = CliRunner().invoke(build_app(), ["parameters", "show", "warmup_steps"])
    assert done.exit_code == 0
    assert done.output.splitlines()[:5] == [
        "schedule.warmup_steps  (of a parameter file)",
        "  The length of the linear warm-up; at most one of `warmup_steps`, `warmup_tokens` and `warmup_ratio` is "
        "given.",
        "  type: integer at least 0",
        "  unit: optimizer steps",
        "  default: 0  (constant, cosine, exponential, inverse_square_root, linear, plateau, polynomial, "
        "warmup_stable_decay)",
    ]
    assert "no preset has that name; did you mean bert_base" in str(
        CliRunner().invoke(build_app(), ["parameters", "show", "bert_bas"]).exception
    )
    assert CliRunner().invoke(build_app(), ["parameters", "show", "no_such_thing"]).exit_code != 0


def test_set_is_completed_from_the_same_keys() -> None:
    assert dict(complete_parameters("data.seq")) == {"data.sequence_length=": "The length of a row."}
    assert [text for text, _ in complete_parameters("precision=b")] == ["precision=bf16"]
    assert [text for text, _ in complete_parameters("optimizer.t")] == ["optimizer.type="]
    assert ("architecture.pos_att_type=c2p" in dict(complete_parameters("architecture.pos_att_type="))) is False
    done = CliRunner().invoke(
        build_app(),
        [],
        prog_name="terakoya",
        env={
            "_TERAKOYA_COMPLETE": "complete_bash",
            "COMP_WORDS": "terakoya train bert_base --set max_m",
            "COMP_CWORD": "4",
        },
    )
    assert done.output.split() == ["max_minutes="]


def test_schemas_accept_presets_and_refuse_misspelt_keys(schemas: dict[str, dict[str, Any]]) -> None:
    for name in preset_names():
        preset = read_value(presets_folder() / f"{name}.json")
        assert accepts(schemas["parameters"], {"$schema": "parameters.schema.json", **preset}), name
    assert not accepts(schemas["parameters"], {**preset, "max_step": 1})
    pipeline = {
        "$schema": "pipeline.schema.json",
        "corpora": {"wiki": {"corpus": "wiki.txt", "clean": [{"type": "nfkc"}]}, "web": {"corpus": ["web.txt"]}},
        "tokenizer": {"type": "mecab_wordpiece", "vocab_size": 8000},
        "tokenizer_folder": "t",
        "store": "s",
        "parameters": {**preset, "data": {"sequence_length": 64}},
        "run": "r",
        "export": "e",
    }
    assert accepts(schemas["pipeline"], pipeline)
    assert accepts(schemas["pipeline"], {**pipeline, "parameters": "bert_base"})
    assert not accepts(schemas["pipeline"], {**pipeline, "tokenizer": {"type": "mecab_wordpiece", "vocab_sise": 1}})
    assert not accepts(schemas["pipeline"], {**pipeline, "clean": [{"type": "nfk"}]})
    assert not accepts(schemas["pipeline"], {**pipeline, "parameters": {"max_step": 1}})


def test_schemas_of_cleaning_tokenizer_and_launcher_settings(schemas: dict[str, dict[str, Any]]) -> None:
    steps = [{"type": "length", "min_characters": 10}, {"type": "hold_out", "share": 0.01}]
    assert accepts(schemas["cleaning"], steps)
    assert accepts(schemas["cleaning"], {"$schema": "x", "clean": steps})
    assert not accepts(schemas["cleaning"], [{"type": "length", "min_character": 10}])
    assert accepts(schemas["tokenizer"], {"$schema": "x", "type": "byte_bpe", "vocab_size": 300, "input": "a.txt"})
    assert not accepts(schemas["tokenizer"], {"type": "byte_bpe", "dictionary": "ipadic"})
    assert accepts(schemas["slurm"], {"$schema": "x", "time": "24:00:00"})
    assert not accepts(schemas["slurm"], {"tme": "24:00:00"})
    with pytest.raises(UserError, match='slrum: there is no such settings file; did you mean "slurm"'):
        schema_of("slrum", registry())


def undescribed(value: Any, path: str = "") -> list[str]:
    """The paths of the properties in a schema that have no description."""
    if isinstance(value, list):
        return [found for number, each in enumerate(value) for found in undescribed(each, f"{path}/{number}")]
    if not isinstance(value, dict):
        return []
    properties = value.get("properties", {})
    own = [f"{path}/{key}" for key, each in properties.items() if isinstance(each, dict) and "description" not in each]
    return own + [found for key, each in value.items() for found in undescribed(each, f"{path}/{key}")]


def test_every_property_of_every_schema_has_a_description(schemas: dict[str, dict[str, Any]]) -> None:
    for name, schema in schemas.items():
        assert undescribed(schema) == [], name
        assert schema["title"] and schema["$schema"].startswith("https://json-schema.org/"), name
    steps = schemas["parameters"]["properties"]["max_steps"]
    assert steps["title"] == "Max Steps" and steps["examples"] == [100000] and steps["default"] is None


def test_the_reference_page_is_what_its_tool_writes() -> None:
    tool = load_tool("write_keys")
    written = tool.page(registry())
    message = "docs/reference/keys.md is not up to date; write it again: .venv/bin/python tools/write_keys.py"
    assert written == tool.PAGE.read_text(encoding="utf-8"), message
    rows = {line.split("`")[1] for line in written.splitlines() if line.startswith("| `")}
    for group in all_groups(registry()):
        assert {group.path + setting.name for setting in group.settings} <= rows, group.path
