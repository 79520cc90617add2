"""Settings files: JSON with comments and last commas, and YAML as JSON would have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.json_settings import read_json, read_settings, read_value
from terakoya_cleaning.reading import load_steps
from terakoya_pipeline.settings import read_pipeline

COMMENTED = r"""// a run
{
  "$schema": "parameters.schema.json",
  "url": "s3://bucket/*not a comment*/", /* where
  it is */ "text": "a \" // b,}",
  "list": [1, 2, [3,],  // last
  ],
  "rate": 1e-4, "none": null,
}
/* end */
"""


def write(folder: Path, text: str, name: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def refusal(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_settings(file)
    return str(caught.value).removeprefix(str(file))


def test_comments_and_last_commas_are_accepted_in_settings_and_not_in_records(tmp_path: Path) -> None:
    file = write(tmp_path, COMMENTED, "p.json")
    assert read_settings(file) == {
        "url": "s3://bucket/*not a comment*/",
        "text": 'a " // b,}',
        "list": [1, 2, [3]],
        "rate": 1e-4,
        "none": None,
    }
    with pytest.raises(UserError, match="not valid JSON: a comment, which this file cannot have"):
        read_json(file)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(value=st.dictionaries(st.text(), VALUES, max_size=3), indent=st.none() | st.integers(0, 2))
def test_what_json_writes_is_read_as_it_is(value: dict[str, object], indent: int | None, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_text(json.dumps({"all": value}, indent=indent), encoding="utf-8")
    assert read_settings(file) == {"all": value}


@pytest.mark.parametrize(("name", "text"), [("a.json", '{"a": 1}'), ("a.yaml", "a: 1\n"), ("plain", "a: 1\n")])
def test_a_byte_order_mark_is_no_part_of_the_settings(tmp_path: Path, name: str, text: str) -> None:
    file = write(tmp_path, "\ufeff" + text, name)
    assert read_settings(file) == {"a": 1}
    assert name != "a.json" or read_json(file) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n  "a": 1,\n  // "b": 1,\n  "b": 2, "a": 3}', ':4:11: the key "a" is given twice, as 1 and as 3; keep one'),
        ('{"x": {"a": 1}, "y": {"b": 0,\n "b": [1]}}', ':2:2: the key "b" is given twice, as 0 and as [1]; keep one'),
        ('{"a": "NaN",\n "b": NaN}', ":2:7: expected a number, got NaN"),
        ('{"a": 1 /* why }', ":1:9: not valid JSON: a comment that is not closed; add */"),
        ('{"a": 1,, }', ":1:9: not valid JSON: a comma with nothing before it; remove it"),
        ("{,}", ":1:2: not valid JSON: a comma with nothing before it; remove it"),
        ('{"a": 1 "b": 2} // late', ':1:8: not valid JSON: expected a comma before "b": 2} // late'),
        ("[" * 100_000, ": its lists and objects are nested too deep"),
        ('{\n "a": ' + "9" * 5000 + "}", ":2:7: expected a number that fits into 64 bits, got a longer one"),
    ],
)
def test_json_errors_name_line_and_column(tmp_path: Path, text: str, said: str) -> None:
    assert refusal(write(tmp_path, text, "p.json")).startswith(said)


YAML = """\
# a run
$schema: parameters.schema.json
rate: 1e-4
small: 1.5E+3
half: .5
count: 010
on: no
tilde: ~
nothing:
time: 24:00:00
day: 2026-01-02
big: 1_000
text: "1e-4"
flag: true
batch_size: {0: 100, -1: 5}
share: &steps [{type: nfkc}]
again: *steps
long: |
  two
  lines
"""


def test_yaml_has_the_values_that_json_has(tmp_path: Path) -> None:
    expected = {
        "rate": 1e-4,
        "small": 1500.0,
        "half": 0.5,
        "count": 10,
        "on": "no",
        "tilde": None,
        "nothing": None,
        "time": "24:00:00",
        "day": "2026-01-02",
        "big": "1_000",
        "text": "1e-4",
        "flag": True,
        "batch_size": {"0": 100, "-1": 5},
        "share": [{"type": "nfkc"}],
        "again": [{"type": "nfkc"}],
        "long": "two\nlines\n",
    }
    assert read_settings(write(tmp_path, YAML, "p.yaml")) == expected
    assert read_settings(write(tmp_path, YAML, "p")) == expected, "without a name, by its first line"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb:\n  c: 2\n  c: 3\n", ':4:3: the key "c" is given twice, as 2 and as 3; keep one'),
        ("a: [1\n", ":2:1: not valid YAML: "),
        ("a:\n\t- 1\n", ":2:1: not valid YAML: found character '\\t' that cannot start any token; indent with spaces"),
        ("a: .nan\n", ":1:4: expected a number, got .nan"),
        ("a: 1e999\n", ":1:4: expected a number, got 1e999"),
        ("a: !!int x\n", ":1:4: expected a number, got x"),
        ("a: !!python/object/apply:os.getcwd []\n", ":1:4: the tag tag:yaml.org,2002:python/object/apply:os.getcwd is"),
        ("a: !env HOME\n", ":1:4: the tag !env is not supported; remove it"),
        ("a: &x\n  b: *x\n", ":1:4: an alias stands inside of what it names"),
        ("? [1]\n: 2\n", ":1:3: expected text as a key, got a list or an object"),
        ("a: 1\n---\nb: 2\n", ":2:1: not valid YAML: but found another document"),
        ("- 1\n", ": expected keys with values, got [1]"),
        ("", ": is empty; expected keys with values"),
        ("a: 0x" + "f" * 5000, f":1:4: expected a number, got 0x{'f' * 58}"),
        ("a: " + "9" * 5000, f":1:4: expected a number, got {'9' * 60}"),
        ("a: " + "[" * 500, ": its lists and objects are nested too deep"),
        (
            "l0: &l0 [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 7)),
            ":1:",
        ),
    ],
)
def test_yaml_errors_name_line_and_column(tmp_path: Path, text: str, said: str) -> None:
    got = refusal(write(tmp_path, text, "p.yaml"))
    assert got.startswith(said)
    assert said != ":1:" or got.endswith("aliases make the file larger than 100,000 values; write less")


PARAMETERS = """\
data: {train: [store], sequence_length: 64}
architecture: {type: bert}
objective: {type: masked_lm}
optimizer: {type: adamw, learning_rate: 1e-4}  # the peak
schedule: {type: linear}
batch_size: {-1: 8}
max_steps: 10
start_from: model
"""


def test_runs_pipelines_and_cleaning_steps_are_read_from_yaml_too(tmp_path: Path) -> None:
    file = write(tmp_path, PARAMETERS, "run.yaml")
    parameters = Parameters.load(file, ["optimizer.learning_rate=2e-4"])
    assert parameters.optimizer.learning_rate == 2e-4 and parameters.batch_size == {"-1": 8}
    copy = write(tmp_path, json.dumps(parameters.dump()), "copy.json")
    assert Parameters.load(copy) == parameters
    with pytest.raises(UserError, match=r'run\.yaml: spikes\.window: expected an integer, got "no"'):
        Parameters.load(write(tmp_path, PARAMETERS + "spikes: {window: no}\n", "run.yaml"))

    pipeline = "corpus: a.txt\ntokenizer_folder: t\nstore: s\nparameters: run.yaml\nrun: r\nexport: e\n"
    file = write(tmp_path, "# a pipeline\n$schema: pipeline.json\n" + pipeline, "pipeline.yml")
    assert read_pipeline(file).corpus == ("a.txt",)

    steps = load_steps(write(tmp_path, '[{"type": "nfkc",},  // first\n]', "clean.json"))
    assert [step.type for step in steps] == ["nfkc"]
    in_object = "$schema: clean.json\nclean:\n- type: nfkc\n"
    assert load_steps(write(tmp_path, in_object, "clean.yaml")) == steps
    assert read_value(write(tmp_path, "- type: nfkc\n", "list.yaml")) == [{"type": "nfkc"}]
    with pytest.raises(UserError, match=r"clean\.yaml: clean\.0\.type: expected one of .*, nfkc"):
        load_steps(write(tmp_path, "clean: [{type: nfk}]\n", "clean.yaml"))
