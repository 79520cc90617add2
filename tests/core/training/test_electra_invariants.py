"""The main guarantees for two models in one: neither topology nor stopping changes it. Real processes, real kills."""

from pathlib import Path
from typing import Any

import pytest
import toy
from killed_runs import kill_and_resume
from saved_weights import relative_error, weights
from selection import at_night

from terakoya.config.parameters import Parameters
from terakoya.training.setup import train_in_this_process

FIXED = [Path(__file__).parents[2] / "helpers" / "fixed_samples.py"]
ARCHITECTURE = {
    "type": "electra", "embedding_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
TIMED = {"time", "tokens_per_second", "samples_per_second", "tflops", "mfu", "slowest_rank", "slowest_rank_excess"}
"""Values that depend on the clock, which no run repeats."""
NUMBERS = (
    "loss", "generator_loss", "generator_accuracy", "sampled_accuracy", "discriminator_loss", "discriminator_accuracy",
    "discriminator_precision", "discriminator_recall", "discriminator_auc", "replaced_rate", "grad_norm",
)  # fmt: skip


def parameters(store: Path, validation: Path | None = None, **changes: Any) -> dict[str, Any]:
    """The parameter JSON of a toy ELECTRA."""
    objective = {"type": "replaced_token", "generator_size": "1/2", "mlm_probability": 0.2}
    return {**toy.parameters(store, validation), "architecture": ARCHITECTURE, "objective": objective, **changes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharing", "precision"),
    at_night([("tied", "fp32"), ("disentangled", "fp32"), ("tied", "bf16")], always=[("tied", "fp32")]),
)
def test_seven_five_four_on_three_nodes_is_sixteen_on_one(
    sharing: str, precision: str, store: Path, tmp_path: Path
) -> None:
    """Uneven nodes, an unequal number of micro-steps, fixed samples: the gradients of one big batch, and every number
    that is reported, those that are no means included."""
    settings = parameters(
        store,
        architecture=toy.without_dropout(ARCHITECTURE),
        objective={"type": "fixed_samples", "generator_size": "1/2", "sharing": sharing, "mlm_probability": 0.2},
        optimizer={"type": "adamw", "learning_rate": 0.1, "eps": 1.0, "weight_decay": 0.0},
        max_steps=3,
        micro_batch_size=3,
        precision=precision,
    )
    exact = 1e-6 if precision == "fp32" else 1e-2
    toy.train({**settings, "batch_size": {"-1": 16}}, tmp_path / "one", plugins=FIXED)
    table = {"0": 7, "1": 5, "2": 4}
    output = toy.train({**settings, "batch_size": table}, tmp_path / "three", nodes=(1, 1, 1), plugins=FIXED)
    assert "3 processes on 3 nodes" in output and "3 micro-steps of 3" in output
    one, three = toy.records(tmp_path / "one"), toy.records(tmp_path / "three")
    assert one.keys() == three.keys() == {1, 2, 3}
    for step in one:
        assert one[step]["discriminator_auc"] != 0.5 and one[step]["replaced_rate"] > 0.05
        for name in set(NUMBERS) & one[step].keys():
            # what counts scores by their sign or their bin moves with a rounding
            counts = name.startswith("discriminator_") and name != "discriminator_loss"
            if not counts or precision == "fp32":
                tolerance = 2e-3 if counts else exact
                assert three[step][name] == pytest.approx(one[step][name], rel=tolerance), (step, name)
    assert relative_error(weights(tmp_path / "one", 3), weights(tmp_path / "three", 3)) < exact


@pytest.mark.nightly
@pytest.mark.parametrize("processes", (1, 2, 3))
def test_killed_and_resumed_is_bit_identical(
    processes: int, store: Path, validation_store: Path, tmp_path: Path
) -> None:
    """With dropout, drawn samples, and an interval of logging that the checkpoint cuts: the histogram goes on too."""
    table = {str(node): rows for node, rows in enumerate([7, 5, 4][:processes])} if processes > 1 else {"-1": 16}
    settings = parameters(store, validation_store, batch_size=table, logging_steps=3)
    kill_and_resume(settings, tmp_path, nodes=(1,) * processes)
    for kind in ("step", "validation"):
        cut, straight = (toy.records(tmp_path / name, kind) for name in ("cut", "straight"))
        assert cut.keys() == straight.keys()
        for step, values in straight.items():
            for name in values.keys() - TIMED:
                assert cut[step][name] == values[name], (kind, step, name)
            assert set(NUMBERS) - values.keys() <= {"grad_norm", "discriminator_precision"}


@pytest.mark.nightly
def test_another_number_of_processes_draws_the_same_samples(store: Path, tmp_path: Path) -> None:
    """With samples of the generator: one process and three report the same, as long as rounding flips no sample."""
    settings = parameters(store, architecture=toy.without_dropout(ARCHITECTURE), max_steps=4)
    toy.train(settings, tmp_path / "one")
    toy.train({**settings, "batch_size": {"0": 7, "1": 5, "2": 4}}, tmp_path / "three", nodes=(1, 1, 1))
    one, three = toy.records(tmp_path / "one"), toy.records(tmp_path / "three")
    for step in one:
        assert three[step]["replaced_rate"] == one[step]["replaced_rate"]
        assert three[step]["sampled_accuracy"] == one[step]["sampled_accuracy"]
        assert three[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", at_night(("lines", "stream", "packed"), always=("lines",)))
def test_every_layout_trains(layout: str, store: Path, line_store: Path, tmp_path: Path) -> None:
    settings = parameters(
        line_store if layout == "lines" else store, max_steps=40, logging_steps=10, micro_batch_size=16,
        checkpoint={"save_steps": 40},
    )  # fmt: skip
    settings["objective"] = {**settings["objective"], "layout": layout, "budgeted": layout != "stream"}
    train_in_this_process(Parameters.from_dict(settings, source="test"), tmp_path / "run")
    records = [line for _, line in sorted(toy.records(tmp_path / "run").items())]
    assert records[-1]["generator_loss"] < records[0]["generator_loss"] - 0.5
    assert records[-1]["discriminator_auc"] > 0.6 > records[0]["discriminator_auc"]
