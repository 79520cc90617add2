"""`rope_scaling`: the frequencies of the papers, in families of Llama's shape, and configs that all readers know."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from terakoya.config.start_from import StartFrom
from terakoya.plugins import registry
from terakoya.toolkit.architectures._rope_scaling import RopeScaling
from terakoya.toolkit.formats import model_folder
from terakoya.training.model.start_config import compare_settings
from terakoya_contract import toy
from terakoya_contract.toy import VOCABULARY

THETA, WIDTH, BEFORE, FACTOR = 10_000.0, 32, 64, 4.0
YARN = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": BEFORE}


def architecture(name: str, **changes: Any) -> Any:
    kind = registry().component("architectures", name)
    return kind.model_validate({**toy.settings(kind).model_dump(), **changes})


def llama(scaling: dict[str, Any] | None) -> Any:
    """One head of 32 dimensions."""
    return architecture(
        "llama", hidden_size=WIDTH, num_attention_heads=1, num_key_value_heads=1, rope_theta=THETA,
        rope_scaling=scaling, max_position_embeddings=256,
    )  # fmt: skip


def plain_frequencies() -> np.ndarray:
    return THETA ** (-np.arange(0, WIDTH, 2, dtype=np.float64) / WIDTH)


def yarn_frequencies() -> np.ndarray:
    """Peng et al., section 3.2: a dimension with r turns in the original length keeps its frequency for r > 32, is
    slowed down for r < 1, and lies between by a straight line over the dimensions' numbers."""

    def dimension(turns: float) -> float:
        return WIDTH * math.log(BEFORE / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), WIDTH - 1)
    slowed = np.clip((np.arange(WIDTH // 2) - low) / (high - low), 0, 1)
    return plain_frequencies() * (1 - slowed) + plain_frequencies() / FACTOR * slowed


@pytest.mark.parametrize(
    ("scaling", "expected", "attention"),
    [
        (None, plain_frequencies(), 1.0),
        ({"rope_type": "linear", "factor": FACTOR}, plain_frequencies() / FACTOR, 1.0),
        (YARN, yarn_frequencies(), 0.1 * math.log(FACTOR) + 1),
        ({**YARN, "attention_factor": 1.0}, yarn_frequencies(), 1.0),
    ],
)
def test_frequencies_are_those_of_the_papers(
    scaling: dict[str, Any] | None, expected: np.ndarray, attention: float
) -> None:
    rotary = llama(scaling).build(VOCABULARY, "causal").model.rotary_emb
    np.testing.assert_allclose(rotary.inv_freq.double().numpy(), expected, rtol=1e-6)
    assert rotary.attention_scaling == pytest.approx(attention)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "eurobert"])
def test_families_export_it_for_both_transformers(name: str, tmp_path: Path) -> None:
    built = architecture(name, rope_scaling=YARN, max_position_embeddings=256)
    assert type(built).model_validate(built.model_dump(mode="json")) == built
    head = "causal" if "causal" in built.heads else "masked"
    model = built.build(VOCABULARY, head).eval()
    model_folder.write(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_scaling"] == YARN
    assert config["rope_theta"] == built.rope_theta
    if head == "causal":
        ids = torch.arange(200)[None] % VOCABULARY.size
        with torch.no_grad():
            read = AutoModelForCausalLM.from_pretrained(tmp_path).eval()(input_ids=ids).logits
            plain = architecture(name, max_position_embeddings=256).build(VOCABULARY, head).eval()
            plain.load_state_dict(model.state_dict())
            assert torch.equal(read, model(input_ids=ids).logits)
            assert not torch.equal(read, plain(input_ids=ids).logits)


def test_linear_scaling_of_olmo_2_is_written_as_transformers_4_accepts_it(tmp_path: Path) -> None:
    """Its config there takes two keys and no other; Transformers 5 reads the same frequencies."""
    built = architecture("olmo2", rope_scaling={"rope_type": "linear", "factor": 4.0})
    model = built.build(VOCABULARY, "causal")
    model_folder.write(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_scaling"] == {"type": "linear", "factor": 4.0}
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(read.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "multiply rope_theta by factor"),
        ({"type": "yarn", "factor": 2.0}, 'original_max_position_embeddings: rope_type "yarn" needs it'),
        ({"type": "linear", "factor": 2.0, "beta_fast": 2.0}, 'beta_fast: rope_type "linear" has no such key'),
        ({"type": "linear", "factor": 0.5}, "greater than or equal to 1"),
    ],
)
def test_mistakes_are_named(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        RopeScaling.model_validate(scaling)


def test_a_start_allows_other_positions_by_name() -> None:
    before, now = (each.config(VOCABULARY) for each in (llama(None), llama(YARN)))
    settable = frozenset(type(llama(None)).model_fields)
    conflicts, allowed = compare_settings(before, now, settable, StartFrom(folder=Path("x")))
    assert len(conflicts) == 1 and "allow another with start_from.new_positions" in conflicts[0] and not allowed
    conflicts, allowed = compare_settings(before, now, settable, StartFrom(folder=Path("x"), new_positions=True))
    assert not conflicts and "rope_parameters" in allowed[0]
    learned = [architecture("gpt2", max_position_embeddings=size).config(VOCABULARY) for size in (32, 64)]
    conflicts, _ = compare_settings(*learned, frozenset(), StartFrom(folder=Path("x"), new_positions=True))
    assert conflicts, "positions that are weights"


@pytest.mark.parametrize("written", [{"type": "linear"}, {"type": "linear", "rope_type": "linear", "beta_fast": None}])
def test_a_start_reads_the_scaling_as_older_versions_of_transformers_write_it(written: dict[str, Any]) -> None:
    now = llama({"rope_type": "linear", "factor": 4.0}).config(VOCABULARY)
    raw = {key: value for key, value in now.to_dict().items() if key != "rope_parameters"}
    before = type(now).from_dict({**raw, "rope_theta": 10_000.0, "rope_scaling": {**written, "factor": 4.0}})
    assert compare_settings(before, now, frozenset({"rope_scaling"})) == ([], [])
    other = type(now).from_dict({**raw, "rope_theta": 10_000.0, "rope_scaling": {**written, "factor": 2.0}})
    assert compare_settings(other, now, frozenset({"rope_scaling"}))[0]
