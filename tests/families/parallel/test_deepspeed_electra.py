"""ELECTRA's two models under DeepSpeed's stages: shared embeddings, a histogram among the sums, two exports."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import toy
from engine_runs import LAST, assert_close, checkpoint, here, settings, start, state
from safetensors.torch import load_file
from selection import at_night, wanted

from terakoya.conversion.export import export

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
STAGES = (2, 3)
SHARING = ("tied", "disentangled")


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of all runs: `tied`, `tied3`, ..."""
    base = tmp_path_factory.mktemp("deepspeed_electra")

    def run(sharing: str, stage: int | None, rows: dict[str, int]) -> dict[str, Any]:
        raw = settings(store, validation_store, stage, rows)
        shape = {"embedding_size": 11, "hidden_size": 30, "num_attention_heads": 6, "intermediate_size": 33 * 2}
        raw["architecture"] = {**raw["architecture"], "type": "electra", **shape}
        raw["objective"] = {"type": "replaced_token", "generator_size": "1/2", "sharing": sharing}
        return raw

    jobs = []
    for sharing in SHARING:
        here(base / sharing, run(sharing, None, {"-1": 7}))
        for stage in wanted(request, "stage"):
            out = str(base / f"{sharing}{stage}")
            jobs.append({"out": out, "settings": run(sharing, stage, {"0": 5, "1": 2})})
    started = start(jobs, base / "pair", 2)
    toy.finish(started)
    return base


@pytest.mark.slow
@pytest.mark.parametrize("stage", at_night(STAGES, always=(3,)))
@pytest.mark.parametrize("sharing", SHARING)
def test_a_stage_trains_what_one_process_trains(runs: Path, sharing: str, stage: int) -> None:
    plain, mine = runs / sharing, runs / f"{sharing}{stage}"
    for kind in ("step", "validation"):
        expected, got = toy.records(plain, kind), toy.records(mine, kind)
        assert expected.keys() == got.keys()
        for step, values in expected.items():
            for name in ("loss", "generator_loss", "discriminator_loss", "replaced_rate", "discriminator_auc"):
                tolerance = 1e-3 if name == "discriminator_auc" else 1e-5
                assert got[step][name] == pytest.approx(values[name], rel=tolerance), (kind, step, name)
    assert_close(state(plain, "model"), state(mine, "model"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", at_night(STAGES, always=(3,)))
@pytest.mark.parametrize("sharing", SHARING)
def test_a_stages_checkpoint_holds_both_models(runs: Path, sharing: str, stage: int, tmp_path: Path) -> None:
    mine = runs / f"{sharing}{stage}"
    export(mine, tmp_path / "model")
    for name in ("generator", "discriminator"):
        own = load_file(checkpoint(mine, LAST) / "model" / name / "model.safetensors")
        assert_close(own, load_file(tmp_path / "model" / name / "model.safetensors"), 0.0)
