"""The parameter JSON: reading, refusals and their messages, keys that may change on resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from terakoya.components.progress import Length
from terakoya.config.file_kinds import kind_of
from terakoya.config.parameters import (
    RESUME_MAY_CHANGE,
    Parameters,
    changed_keys,
    check_allowed_changes,
    resolve_length,
    whole_sections,
)
from terakoya.errors import UserError
from terakoya.json_settings import NOTES, apply_overrides, origins, read_json
from terakoya.plugins import registry
from terakoya_schemas.parameters import json_schema

PRESETS = Path(__file__).resolve().parents[3] / "parameters"

BASE: dict[str, Any] = {
    "data": {"train": ["work/a", {"store": "work/b", "weight": 2}], "validation": ["work/v"], "sequence_length": 128},
    "architecture": {"type": "bert", "hidden_size": 64, "num_attention_heads": 4},
    "objective": {"type": "masked_lm"},
    "optimizer": {"type": "adamw", "learning_rate": 1, "betas": [0.9, 0.98]},
    "schedule": {"type": "linear"},
    "batch_size": {"-1": 256},
    "max_steps": 100,
    "trackers": [{"type": "tensorboard"}],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "base.json"
    path.write_text(json.dumps(BASE), encoding="utf-8")
    return path


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        Parameters.load(file, overrides)
    return str(caught.value)


# -------------------------------------------------------------------------------------------------- reading


def test_a_file_becomes_typed_objects_with_defaults(file: Path) -> None:
    parameters = Parameters.load(file)
    assert [(str(each.store), each.weight) for each in parameters.data.train] == [("work/a", 1.0), ("work/b", 2.0)]
    assert type(parameters.architecture) is registry().component("architectures", "bert")
    assert parameters.architecture.hidden_size == 64  # type: ignore[attr-defined]
    assert parameters.optimizer.betas == (0.9, 0.98)  # type: ignore[attr-defined]
    assert isinstance(parameters.optimizer.learning_rate, float)  # type: ignore[attr-defined]
    assert (parameters.precision, parameters.parallel.engine, parameters.seed) == ("auto", "ddp", 42)
    assert parameters.evaluation is None and parameters.checkpoint.keep == 3


def test_the_dump_is_complete_and_gives_the_same_parameters_back(file: Path) -> None:
    parameters = Parameters.load(file, ["parallel.engine=deepspeed", "parallel.zero_stage=2", "evaluation.steps=5"])
    dumped = json.loads(json.dumps(parameters.dump()))
    assert dumped["architecture"]["type"] == "bert" and dumped["architecture"]["num_hidden_layers"] == 12
    assert dumped["trackers"][0]["type"] == "tensorboard"
    assert set(dumped) == set(Parameters.model_fields)
    assert Parameters.from_dict(dumped, source="manifest.json") == parameters


@pytest.mark.parametrize("preset", sorted(path.name for path in PRESETS.glob("*_*.json")))
def test_a_preset_loads_and_has_enough_positions_for_its_rows(preset: str) -> None:
    assert kind_of(json.loads((PRESETS / preset).read_text())) == "a parameter file"
    parameters = Parameters.load(PRESETS / preset)
    assert str(parameters.data.train[0].store) == "work/store"
    longest = parameters.architecture.max_sequence_length()
    assert longest is None or longest >= parameters.data.sequence_length


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('architecture.hidden_size="768"', 'architecture.hidden_size: expected an integer, got "768"'),
        ("architecture.hidden_size=768.0", "architecture.hidden_size: expected an integer, got 768.0"),
        ("architecture.hidden_size=true", "architecture.hidden_size: expected an integer, got true"),
        ("architecture.hiden_size=3", 'architecture.hiden_size: unknown key; did you mean "hidden_size"'),
        ("architecture.type=bart", 'architecture.type: architecture bart: not installed; did you mean "bert"?'),
        ("architecture={}", 'architecture.type: missing; known: "bert"'),
        ("architecture=bert", 'architecture: expected an object with a "type", got "bert"'),
        (
            "objective.mlm_probability=1.5",
            "objective.mlm_probability: expected a number above 0 and below 1, or an object such as ",
        ),
        ("objective.next_sentence=true", 'objective: next_sentence true and layout "pairs" need each other'),
        ("optimizer.learning_rate=fast", 'optimizer.learning_rate: expected a number, got "fast"'),
        ("optimizer.learning_rate=Infinity", "optimizer.learning_rate: expected a finite number, got Infinity"),
        ("optimizer.learning_rate=1e999", "optimizer.learning_rate: expected a finite number, got Infinity"),
        ("max_grad_norm=Infinity", "max_grad_norm: expected a finite number, got Infinity"),
        (
            "trackers.0.type=tensorbord",
            'trackers.0.type: tracker tensorbord: not installed; did you mean "tensorboard"',
        ),
        ("trackers=3", "trackers: expected a list, got 3"),
        ("optimizer.betas=3", "optimizer.betas: expected a list, got 3"),
        ("max_step=3", 'max_step: unknown key; did you mean "max_steps"'),
        ("precision=fp64", 'precision: expected "auto", "fp32", "bf16", "fp16" or "fp8", got "fp64"'),
        ('logging_steps="10"', 'logging_steps: expected an integer, got "10"'),
        ('data.sequence_length="128"', 'data.sequence_length: expected an integer, got "128"'),
        ('batch_size={"-1": "256"}', 'batch_size.-1: expected an integer, got "256"'),
        ('data.train.1.weight="2"', 'data.train.1.weight: expected a number, got "2"'),
        ('max_grad_norm="1"', 'max_grad_norm: expected a number, got "1"'),
        ("seed=-1", "seed: expected greater than or equal to 0, got -1"),
        ("checkpoint.keep=1", "checkpoint.keep: expected greater than or equal to 2, got 1"),
        ("data.train=[]", "data.train: "),
        ("data.train.0=7", "data.train.0: expected an object, got 7"),
        ("data.train.1.wait=7", 'data.train.1.wait: unknown key; did you mean "weight"'),
        ("data.sequence_length=1024", "data.sequence_length: expected at most 512"),
        ("epochs=2", "expected exactly one of max_steps, max_tokens, epochs, got max_steps, epochs"),
        ("max_steps=null", "expected exactly one of max_steps, max_tokens, epochs, got none"),
        ("parallel.zero_stage=1", 'parallel: zero_stage 1 needs engine "deepspeed", got "ddp"'),
        ("parallel.engine=deepspeed", 'parallel: engine "deepspeed" needs zero_stage'),
        ("batch_size=64", 'batch_size: expected the rows of each node, got 64; write {"-1": 64}'),
    ],
)
def test_a_wrong_value_is_refused_with_key_expectation_and_nearest_name(
    file: Path, override: str, expected: str
) -> None:
    message = refusal(file, override)
    origin, _, problem = message.partition(": ")
    assert problem.startswith(expected)
    assert origin == ("--set" if f"{problem}.".startswith(override.partition("=")[0]) else "base.json with --set")
    assert len([line for line in message.splitlines() if line.startswith(f"{origin}: ")]) == 1, "one problem, one line"


@pytest.mark.parametrize(
    ("table", "corrected"),
    [
        ('{"0": 100, "2": 56}', '{"0": 100, "1": 56}'),
        ('{"-1": 100, "0": 56}', '{"0": 100, "1": 56}'),
        ('{"0": 256, "1": 0}', '{"0": 256, "1": 1}'),
        ('{"1": 256}', '{"-1": 256}'),
        ("{}", '{"-1": 256}'),
    ],
)
def test_a_wrong_batch_table_is_refused_with_a_corrected_one(file: Path, table: str, corrected: str) -> None:
    message = refusal(file, f"batch_size={table}")
    assert message.startswith("--set: batch_size: expected") and message.endswith(f"for example {corrected}")
    Parameters.load(file, [f"batch_size={corrected}"])


def test_evaluation_needs_a_store(file: Path) -> None:
    assert "evaluation: there is nothing to evaluate on" in refusal(file, "data.validation=[]", "evaluation.steps=3")


def test_all_problems_are_reported_at_once(file: Path) -> None:
    message = refusal(file, "architecture.hidden_size=a", "schedule.type=x", "seed=b", "optimizer.eps=-1", "dat=1")
    keys = [line.split(": ")[1] for line in message.splitlines() if line.startswith("--set")]
    assert sorted(keys) == ["architecture.hidden_size", "dat", "optimizer.eps", "schedule.type", "seed"]


def test_a_slip_in_the_file_is_not_one_of_the_command_line(file: Path) -> None:
    file.write_text(json.dumps({**BASE, "sed": 1}))
    assert refusal(file, "max_step=3").splitlines() == [
        'base.json: sed: unknown key; did you mean "seed"?',
        '--set: max_step: unknown key; did you mean "max_steps" or "max_tokens"?',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ([98, 3], "the shares add up to 101; of the documents 97.03% train and 2.97% validate"),
        ([998, 2, 1], "the shares add up to 1001; of the documents 99.70% train and 0.20% validate"),
        *(([*shares], None) for shares in ((98, 2), (0.98, 0.02), (998, 1, 1), (9, 1), (0.7, 0.2, 0.1))),
    ],
)
def test_shares_that_add_up_to_no_round_number_are_told(file: Path, split: list[float], said: str | None) -> None:
    told = Parameters.load(file, ["data.validation=[]", f"data.split={split}"]).data.odd_split()
    assert told == (said and f"data.split: {said}")


def test_a_missing_key_is_named(file: Path) -> None:
    raw = {key: value for key, value in BASE.items() if key != "optimizer"}
    with pytest.raises(UserError, match=r"x\.json: optimizer: missing"):
        Parameters.from_dict(raw, source="x.json")


@pytest.mark.parametrize(
    "override",
    [
        "data.validation.0=hf_" + "a" * 34,
        "x=AKIA" + "A" * 16,
        "trackers.0.api_key=secret-of-mine",
        "trackers.0.token=abc",
        "note=sk-" + "b" * 30,
    ],
)
def test_a_secret_is_refused_and_never_printed(file: Path, override: str) -> None:
    message = refusal(file, override)
    key, value = override.split("=")
    assert f"{key}: looks like a secret" in message and value not in message


# -------------------------------------------------------------------------------------------------- overrides, origins


def test_overrides_are_json_if_they_parse_and_strings_otherwise(file: Path) -> None:
    raw = apply_overrides(read_json(file), ["a.b=1e-4", "c=[1, 2]", "d=hello world", "data.train.0=x=y", 'e="3"'])
    assert raw["a"] == {"b": 1e-4} and raw["c"] == [1, 2] and raw["d"] == "hello world" and raw["e"] == "3"
    assert raw["data"]["train"][0] == "x=y"
    assert read_json(file) == BASE, "the file's own object does not change"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "expected KEY.KEY=VALUE"),
        ("a..b=1", "expected KEY.KEY=VALUE"),
        ("data.train.9=x", "data.train is a list: expected an index below 2, got 9"),
        ("max_steps.x=1", "max_steps is 100, which has no keys"),
    ],
)
def test_an_override_of_a_path_that_does_not_exist_is_refused(file: Path, override: str, expected: str) -> None:
    assert expected in refusal(file, override)


def test_each_value_knows_its_origin(file: Path) -> None:
    overrides = ["schedule.warmup_steps=10", "checkpoint.keep=5"]
    origin = origins(Parameters.load(file, overrides).dump(), read_json(file), overrides)
    assert origin["schedule.warmup_steps"] == origin["checkpoint.keep"] == "command line"
    assert origin["architecture.hidden_size"] == origin["optimizer.betas.1"] == "file"
    assert origin["data.train.0.store"] == "file", "given as a plain string"
    assert origin["architecture.num_hidden_layers"] == origin["checkpoint.save_steps"] == origin["seed"] == "default"


# -------------------------------------------------------------------------------------------------- length, resuming


def test_the_length_comes_from_steps_tokens_or_epochs(file: Path) -> None:
    def length(*overrides: str, rows: int = 1000, tokens_per_row: float = 100.0) -> Length:
        parameters = Parameters.load(file, overrides)
        return resolve_length(parameters, rows=rows, tokens_per_row=tokens_per_row, global_rows=256)

    assert length() == Length(steps=100, tokens=2_560_000)
    epochs = length("max_steps=null", "epochs=2.5")
    assert epochs == Length(steps=10, tokens=250_000, rows=2500), "the last step holds 196 rows"
    assert length("max_steps=null", "epochs=0.001") == Length(steps=1, tokens=100, rows=1)
    tokens = length("max_steps=null", "max_tokens=51201")
    assert tokens == Length(steps=3, tokens=51201, unit="tokens"), "25,600 tokens a step"
    ends = [tokens.is_reached(step=step, tokens=seen) for step, seen in [(3, 51200), (3, 51201), (2, 60000), (9, 0)]]
    assert ends == [False, True, True, False], "by the tokens seen, not by the steps expected"
    assert [epochs.is_reached(step=step, tokens=10**9) for step in (9, 10)] == [False, True]
    with pytest.raises(UserError, match="no row to train on"):
        length("max_steps=null", "epochs=1", rows=0, tokens_per_row=0.0)


def test_a_length_in_rows_counts_consumed_rows() -> None:
    """A run of 1000 rows in steps of 16 ended with a step of 8; extended to 2000 rows it continues with the 1001st."""
    longer = Length(steps=125, tokens=0, rows=2000)
    assert longer.after_resuming(step=63, consumed_rows=1000, global_rows=16).steps == 126
    assert longer.after_resuming(step=50, consumed_rows=800, global_rows=16).steps == 125
    assert Length(steps=9, tokens=0).after_resuming(step=5, consumed_rows=80, global_rows=16).steps == 9


def test_a_schedule_that_depends_on_validation_needs_an_evaluation(file: Path) -> None:
    assert "schedule: Plateau depends on validation losses" in refusal(file, 'schedule={"type": "plateau"}')


def test_changed_keys_are_key_paths(file: Path) -> None:
    old = Parameters.load(file)
    new = Parameters.load(file, ["max_steps=200", "optimizer.learning_rate=0.5", 'data.train=["work/a"]'])
    assert changed_keys(old, old) == []
    expected = ["data.train.1.store", "data.train.1.weight", "max_steps", "optimizer.learning_rate"]
    assert changed_keys(old, new) == changed_keys(old.dump(), new) == expected


def test_length_logging_saving_and_evaluation_may_change_on_resume(file: Path) -> None:
    free = ["max_steps=9", "logging_steps=1", "checkpoint.keep=9", "trackers=[]", "evaluation.steps=3", "max_minutes=1"]
    changed = changed_keys(Parameters.load(file), Parameters.load(file, free))
    assert len(changed) >= 6
    assert all(any(path == key or path.startswith(f"{key}.") for key in RESUME_MAY_CHANGE) for path in changed)
    assert not {"seed", "optimizer", "objective", "precision", "data", "data.train"} & RESUME_MAY_CHANGE


# -------------------------------------------------------------------------------------------------- schema


def test_the_schema_has_every_installed_component_as_a_choice_by_type() -> None:
    schema = json_schema(registry())
    assert set(schema["properties"]) == {*Parameters.model_fields, *NOTES}
    assert {"data", "architecture", "objective", "optimizer", "schedule", "batch_size"} == set(schema["required"])
    assert schema["additionalProperties"] is False
    choices = schema["properties"]["schedule"]["discriminator"]["mapping"]
    assert set(choices) == set(registry().names("schedules"))
    linear = schema["$defs"][choices["linear"].removeprefix("#/$defs/")]
    assert linear["properties"]["type"]["const"] == "linear" and "warmup_steps" in linear["properties"]
    assert linear["additionalProperties"] is False and "type" in linear["required"]
    assert json.dumps(schema)


# ------------------------------------------------------------------------------------------- allowed changes


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("learning_rate", 'unknown key; that is "optimizer.learning_rate" here'),
        ("lr", 'unknown key; that is "optimizer.learning_rate" here'),
        ("optimizer.lr", 'unknown key; that is "optimizer.learning_rate" here'),
        ("optimizer.learning_rat", 'unknown key; did you mean "optimizer.learning_rate"?'),
        ("qqq", "unknown key; `terakoya parameters show FILE` lists the keys"),
    ],
)
def test_an_allowed_change_of_an_unknown_key_is_refused(key: str, said: str) -> None:
    parameters = Parameters.from_dict(BASE, source="p.json")
    with pytest.raises(UserError) as caught:
        check_allowed_changes([key], parameters, registry())
    assert str(caught.value) == f"--allow-change {key}: {said}"


def test_an_allowed_change_may_be_any_key_or_section() -> None:
    keys = ["optimizer.learning_rate", "optimizer", "data", "data.train.0.store", "start_from", "start_from.folder"]
    keys += ["data.train.1", "data.train.1.weight"]  # of an entry that the list had when the run was started
    check_allowed_changes(keys, Parameters.from_dict(BASE, source="p.json"), registry())


def test_a_section_that_only_one_side_has_counts_as_one_change() -> None:
    old, new = {"start_from": None, "lora": {"r": 1}, "seed": 1}, {"start_from": {"folder": "x"}, "lora": {"r": 2}}
    assert whole_sections(["start_from", "start_from.folder", "lora.r", "seed"], old, new) == [
        "start_from", "lora.r", "seed",
    ]  # fmt: skip
    stores = {"data": {"validation": []}}, {"data": {"validation": ["a", "b"]}}
    assert whole_sections(["data.validation", "data.validation.0"], *stores) == ["data.validation"]
