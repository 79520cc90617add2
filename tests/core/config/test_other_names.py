"""Keys that other trainers have: each is answered with the key, or the sentence, that says what to do here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from terakoya.config.other_names import ELSEWHERE, SENTENCES, VALUES, find_equivalent, key_paths
from terakoya.config.parameters import COMPONENTS, Parameters
from terakoya.errors import UserError
from terakoya.plugins import registry

BASE: dict[str, Any] = {
    "data": {"train": ["work/store"], "sequence_length": 64},
    "architecture": {"type": "bert"},
    "objective": {"type": "masked_lm"},
    "optimizer": {"type": "adamw", "learning_rate": 1e-3},
    "schedule": {"type": "linear"},
    "batch_size": {"-1": 8},
    "max_steps": 4,
}


def all_paths() -> list[str]:
    kinds = {key: [registry().component(kind, name) for name in registry().names(kind)]
             for key, kind in COMPONENTS.items()}  # fmt: skip
    return key_paths(Parameters, kinds)


def refusal(path: str, value: Any = 1, **changes: Any) -> str:
    raw = json.loads(json.dumps(BASE | changes))
    place = raw
    *above, key = path.split(".")
    for name in above:
        place = place.setdefault(name, {})
    place[key] = value
    with pytest.raises(UserError) as caught:
        Parameters.from_dict(raw, source="p.json")
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith(f"p.json: {path}: ")]
    return line.removeprefix(f"p.json: {path}: ")


def test_every_name_leads_to_a_key_that_exists() -> None:
    assert not set(ELSEWHERE) - set(all_paths())
    names = [name for words in ELSEWHERE.values() for name in words.split()]
    assert len(set(names)) > 120 and not set(names) & set(SENTENCES) and set(VALUES) <= set(names)
    for words in ELSEWHERE.values():
        assert len(set(words.split())) == len(words.split())


def test_no_name_of_another_trainer_hides_a_key_that_exists_at_the_top() -> None:
    assert not {*SENTENCES, *(name for words in ELSEWHERE.values() for name in words.split())} & set(
        Parameters.model_fields
    )


def test_every_name_is_answered_with_its_keys() -> None:
    paths = all_paths()
    for path, words in ELSEWHERE.items():
        for name in words.split():
            found, sentence = find_equivalent(name, paths)
            is_a_key = any(each.endswith(f".{name}") for each in paths)
            assert (path in found or is_a_key) and found and not sentence, name


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("Learning-Rate", 'that is "optimizer.learning_rate" here'),
        ("bf16", 'that is "precision": "bf16" here'),
        ("dropout", 'that is "architecture.hidden_dropout_prob" here'),
        ("output_dir", "the run's folder is given on the command line: --out RUN"),
        ("gradient_accumulation_steps", "it follows from batch_size and micro_batch_size"),
        ("resume_from_checkpoint", "the same command with the same --out continues a run"),
        ("keeep", 'did you mean "checkpoint.keep"?'),
        ("objectiv", 'did you mean "objective"?'),
    ],
)
def test_a_foreign_key_is_answered_with_the_key_here(path: str, said: str) -> None:
    assert refusal(path).startswith("unknown key; ") and said in refusal(path)


def test_the_answer_has_the_names_of_the_chosen_architecture() -> None:
    gpt = {"architecture": {"type": "gpt2"}, "objective": {"type": "causal_lm"}}
    assert refusal("architecture.n_embd", 32, **gpt) == 'unknown key; that is "architecture.hidden_size" here'
    assert refusal("architecture.ffn_dim", 32, **gpt) == 'unknown key; that is "architecture.n_inner" here'
    assert refusal("architecture.ffn_dim", 32) == 'unknown key; that is "architecture.intermediate_size" here'


def test_the_known_keys_are_listed_once() -> None:
    with pytest.raises(UserError) as caught:
        Parameters.from_dict({**BASE, "qqq": 1, "zzz": 2}, source="p.json")
    first, second = str(caught.value).splitlines()
    assert first.startswith('p.json: qqq: unknown key; known: "activation_checkpointing", ')
    assert second == "p.json: zzz: unknown key"


def test_notes_for_the_editor_and_for_readers_are_accepted_at_the_top_alone(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"$schema": "../schema.json", "_comment": ["why", "so"], **BASE}))
    assert Parameters.load(file) == Parameters.from_dict(BASE, source="p.json")
    file.write_text(json.dumps({**BASE, "_comments": "x"}))
    with pytest.raises(UserError, match=re.escape("_comments: unknown key")):
        Parameters.load(file)
    file.write_text(json.dumps({**BASE, "schedule": {"type": "linear", "_comment": "x"}}))
    with pytest.raises(UserError, match=re.escape("schedule._comment: unknown key")):
        Parameters.load(file)
