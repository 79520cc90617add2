"""What every registered component must do, whoever brings it."""

import json
from pathlib import Path

import pytest
import toy
import transformers

from terakoya.components import KINDS
from terakoya.data.store import TokenStore
from terakoya.errors import UserError
from terakoya.export_model import export
from terakoya.parameters import Parameters
from terakoya.plugins import load
from terakoya.training.setup import train_here

OBJECTIVES = {"replaced_token": {"generator_size": "1/2"}}
"""Settings that an objective needs at toy size."""
OFFERS = load().components()
TOY_SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: f"{offer.kind}-{offer.name}")
def test_a_component_is_settings_and_says_what_it_is(offer: object) -> None:
    component = offer.component  # type: ignore[attr-defined]
    assert issubclass(component, KINDS[offer.kind])  # type: ignore[attr-defined]
    assert component.__doc__ and component.__doc__ != KINDS[offer.kind].__doc__  # type: ignore[attr-defined]
    settings = component()
    again = component.model_validate_json(json.dumps(settings.model_dump(mode="json")))
    assert again == settings and hash(again) == hash(settings)
    with pytest.raises(ValueError, match="frozen"):
        setattr(settings, next(iter(component.model_fields), "anything"), None)
    with pytest.raises(ValueError, match="Extra inputs"):
        component.model_validate({"no_such_setting": 1})
    assert component.model_json_schema()["additionalProperties"] is False


@pytest.mark.parametrize("optimizer", [each.name for each in OFFERS if each.kind == "optimizers"])
@pytest.mark.parametrize("schedule", [each.name for each in OFFERS if each.kind == "schedules"])
@pytest.mark.parametrize("architecture", [each.name for each in OFFERS if each.kind == "architectures"])
@pytest.mark.parametrize("objective", [each.name for each in OFFERS if each.kind == "objectives"])
def test_it_learns_resumes_exports_and_loads(
    architecture: str, objective: str, optimizer: str, schedule: str, tmp_path: Path
) -> None:
    store = toy.make_store(tmp_path / "store", documents=60, seed=5)
    settings = toy.parameters(
        store,
        architecture={"type": architecture, **TOY_SIZES},
        objective={"type": objective, **OBJECTIVES.get(objective, {})},
        optimizer={"type": optimizer, "learning_rate": 0.01},
        schedule={"type": schedule},
        max_steps=40,
        logging_steps=10,
        checkpoint={"save_steps": 20},
    )

    parameters = Parameters.from_dict(settings, source="test")
    try:
        parameters.objective.build(parameters.architecture, TokenStore.open(store).facts.vocabulary)
    except UserError as error:
        if "has no head" not in str(error):
            raise
        pytest.skip(str(error))

    def train(out: Path, **changes: object) -> None:
        train_here(Parameters.from_dict({**settings, **changes}, source="test"), out)

    train(tmp_path / "run")
    course = toy.losses(tmp_path / "run")
    assert course[40][0] < course[1][0] - 0.5, "it learns"
    folder = tmp_path / "run/checkpoints/step-00000040"
    weights = (folder / "state/model-00000.safetensors").read_bytes()
    folder.rename(tmp_path / "gone")
    train(tmp_path / "run")
    assert toy.losses(tmp_path / "run") == course, "it resumes"
    assert (folder / "state/model-00000.safetensors").read_bytes() == weights
    done = export(tmp_path / "run", tmp_path / "model")
    for name, model in done.models.items():
        _, report = getattr(transformers, model).from_pretrained(
            done.out / name, local_files_only=True, output_loading_info=True
        )
        assert not report["missing_keys"] and not report["unexpected_keys"], "it loads"
