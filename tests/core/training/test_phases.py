"""Runs with phases: the borders are borders of steps, and neither kills nor topology change what a step does."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from saved_weights import FAULTS, relative_error, same_weights, weights
from selection import at_night
from transformers import ModernBertForMaskedLM

from terakoya.config.parameters import Parameters
from terakoya.config.presets import presets_folder
from terakoya.conversion.export import export
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.errors import UserError
from terakoya.rows.stores import Stores
from terakoya.runs import status
from terakoya.training.batches import BatchMaker
from terakoya.training.model.build import build_module
from terakoya.training.model.changed_settings import change_settings
from terakoya.training.model.module_parts import top_level_models
from terakoya.training.run_plan import make_plan
from terakoya.training.setup import train_in_this_process
from terakoya_forks.fork import fork
from terakoya_planning.phases import estimate_phases, whole_run

MODEL = {
    "type": "modernbert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64, "local_attention": 8, "global_rope_theta": 10_000.0,
}  # fmt: skip


def phased(store: Path, other: Path, *, nodes: int = 1, **changes: Any) -> dict[str, Any]:
    """Three phases as ModernBERT's and mmBERT's: short rows, long rows of another mixture, a decay."""
    short, long = ({"-1": rows} if nodes == 1 else split(rows, nodes) for rows in (16, 6))
    mixture = [{"store": str(store), "weight": 1.0}, {"store": str(other), "weight": 2.0}]
    long_rows = {"data": {"sequence_length": 64, "train": mixture}, "batch_size": long, "micro_batch_size": 2}
    extended = {"architecture": {"global_rope_theta": 160_000.0, "local_attention": 16}, **long_rows}
    return toy.parameters(
        store, other, architecture=MODEL, batch_size=short, checkpoint={"save_steps": 1, "keep": 20},
        phases=[
            {"name": "short rows", "steps": 5, "objective": {"mlm_probability": 0.3}},
            {
                "name": "long rows", "steps": 4, "objective": {"mlm_probability": {"start": 0.3, "end": 0.1}},
                "optimizer": {"learning_rate": 0.003}, "schedule": {"type": "constant"}, **extended,
            },
            {
                "name": "decay", "steps": 3, "objective": {"mlm_probability": 0.05},
                "schedule": {"type": "warmup_stable_decay", "decay_ratio": 1.0, "decay_type": "1-sqrt"}, **extended,
            },
        ],
        **changes,
    )  # fmt: skip


ALONE = Topology((ProcessInfo(0, 0, 0, "here"),))


def open_stores(parameters: Parameters) -> Stores:
    return Stores.open(parameters.data, [phase.data for phase in parameters.of_phases])


def split(rows: int, nodes: int) -> dict[str, int]:
    return {str(node): rows // nodes + (node < rows % nodes) for node in range(nodes)}


def check_kills(settings: Mapping[str, Any], nodes: Sequence[int], steps: Sequence[int], folder: Path) -> None:
    """Kills the run after each of `steps`, starts it again each time, and compares it with one that ran through."""
    toy.train(dict(settings), folder / "straight", nodes=nodes, plugins=FAULTS)
    for step in steps:
        environment = {"FAULT": f"kill:{step}", "FAULT_RANK": str(len(nodes) - 1)}
        toy.train(settings, folder / "cut", nodes=nodes, plugins=FAULTS, environment=environment, code=None)
        assert step - 1 <= max(toy.records(folder / "cut")) <= step + 1
    toy.train(dict(settings), folder / "cut", nodes=nodes, plugins=FAULTS)
    assert toy.losses(folder / "cut") == toy.losses(folder / "straight")
    assert learning_rates(folder / "cut") == learning_rates(folder / "straight")
    assert same_weights(folder / "cut", folder / "straight", 12)


def learning_rates(run: Path) -> dict[int, float]:
    return {step: record["learning_rate"] for step, record in toy.records(run).items()}


def trained(settings: Mapping[str, Any], out: Path) -> Path:
    """Trains in this process."""
    parameters = Parameters.from_dict(settings, source=out.name)
    train_in_this_process(parameters, out)
    return out


@pytest.fixture(scope="module")
def straight(store: Path, validation_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of three phases with a checkpoint after every step."""
    return trained(phased(store, validation_store), tmp_path_factory.mktemp("phases") / "straight")


@pytest.mark.slow
@pytest.mark.parametrize("step", at_night((4, 5, 6, 9, 11), always=(5,)))
def test_from_a_checkpoint_around_a_border_the_run_goes_on_bit_for_bit(
    step: int, straight: Path, store: Path, validation_store: Path, tmp_path: Path
) -> None:
    out = tmp_path / "resumed"
    shutil.copytree(straight / f"checkpoints/step-{step:08d}", out / f"checkpoints/step-{step:08d}")
    trained(phased(store, validation_store), out)
    after = {number: values for number, values in toy.losses(straight).items() if number > step}
    assert toy.losses(out) == after
    assert learning_rates(out).items() <= learning_rates(straight).items()
    assert same_weights(out, straight, 12)
    expected = [number for first, number in ((0, 1), (5, 2), (9, 3)) if first >= step]
    assert [record["number"] for record in toy.records(out, "phase").values()] == expected


@pytest.mark.nightly
def test_a_phase_may_have_more_rows_than_the_table_of_the_run(
    straight: Path, store: Path, validation_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = phased(store, validation_store)
    settings["phases"][0]["batch_size"], settings["batch_size"] = settings["batch_size"], {"-1": 4}
    out = trained(settings, tmp_path / "large first")
    assert toy.losses(out) == toy.losses(straight)
    shutil.copytree(out / "checkpoints/step-00000005", tmp_path / "resumed/checkpoints/step-00000005")
    assert same_weights(trained(settings, tmp_path / "resumed"), straight, 12)

    fork(out / "checkpoints/step-00000005", tmp_path / "fork", ["phases=[]"])
    without = json.loads((tmp_path / "fork/parameters.json").read_text())
    forked = trained(without, tmp_path / "fork")
    assert max(toy.losses(forked)) == 12
    again = tmp_path / "fork again"
    shutil.copytree(forked / "checkpoints/step-00000009", again / "checkpoints/step-00000009")
    capsys.readouterr()
    assert same_weights(trained(without, again), forked, 12)
    assert "fewer rows" not in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "before"), [(4, 80), (16, 30)])
def test_a_fork_without_phases_counts_its_progress_from_the_rows_that_were_taken(
    rows: int, before: int, store: Path
) -> None:
    settings = toy.parameters(store, architecture=MODEL, max_steps=12, batch_size={"-1": rows})
    parameters = Parameters.from_dict(settings, source="test")
    plan = make_plan(parameters, open_stores(parameters), ALONE, 0).continued_at(5, before)
    assert plan.rows(5) == (before, before + rows) and plan.rows(11) == (before + 6 * rows, before + 7 * rows)
    assert [plan.objective_progress(step) for step in (5, 11, 12)] == [
        before / (before + 7 * rows), (before + 6 * rows) / (before + 7 * rows), 1.0
    ]  # fmt: skip
    assert plan.remaining_rows(5, 12) == 7 * rows


def test_each_phase_has_its_rows_rates_and_masks(straight: Path, store: Path, validation_store: Path) -> None:
    parameters = Parameters.from_dict(phased(store, validation_store), source="test")
    rates = learning_rates(straight)
    assert [rates[step] for step in (1, 4, 5)] == [0.00125, 0.005, 0.005], "the schedule of the run: it counts the run"
    assert [rates[step] for step in (6, 9)] == [0.003, 0.003]
    assert rates[10] == 0.005 and abs(rates[12] - 0.005 * (1 - (2 / 3) ** 0.5)) < 1e-12, "it counts the phase"
    manifests = [
        json.loads((straight / f"checkpoints/step-{step:08d}/manifest.json").read_text()) for step in (5, 6, 12)
    ]
    assert [manifest["consumed_rows"] for manifest in manifests] == [80, 86, 80 + 7 * 6]
    assert [manifest["phase"]["number"] for manifest in manifests] == [1, 2, 3]
    assert manifests[1]["phase"]["tokens_before"] == manifests[0]["consumed_tokens"]

    plan = make_plan(parameters, open_stores(parameters), ALONE, 0)
    assert [plan.rows(step) for step in (4, 5, 8, 9)] == [(64, 80), (80, 86), (98, 104), (104, 110)]
    batches = BatchMaker(plan, plan.loader.sources[0].vocabulary)
    shares = []
    for step in (4, 5, 8, 9):
        made = batches(step).real
        assert {each.arrays["input_ids"].shape[1] for each in made} == {32 if step < 5 else 64}
        assert sum(len(each.arrays["input_ids"]) for each in made) == (16 if step < 5 else 6)
        shares.append(sum(each.counts["masked"] for each in made) / sum(each.counts["tokens"] for each in made))
    for share, expected in zip(shares, (0.3, 0.3, 0.15, 0.05), strict=True):  # less: words are masked whole
        assert abs(share - expected) < 0.03


@pytest.mark.slow
def test_a_schedule_in_tokens_counts_those_of_its_phase_also_after_a_resume(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(
        store, architecture=MODEL, max_steps=6, checkpoint={"save_steps": 1, "keep": 20},
        phases=[{"steps": 3}, {"schedule": {"type": "constant", "warmup_tokens": 2000}}],
    )  # fmt: skip
    run = trained(settings, tmp_path / "straight")
    tokens, rates = {step: record["tokens"] for step, record in toy.records(run).items()}, learning_rates(run)
    assert rates[4] < 0.3 * 0.005 and rates[6] > rates[5] > rates[4], "the warm-up begins with the phase"
    assert rates[6] - rates[5] == pytest.approx(0.005 * (tokens[5] - tokens[4]) / 2000)
    out = tmp_path / "resumed"
    shutil.copytree(run / "checkpoints/step-00000005", out / "checkpoints/step-00000005")
    assert learning_rates(trained(settings, out)) == {6: rates[6]}


@pytest.mark.slow
def test_exports_have_the_positions_and_the_window_of_their_phase(straight: Path, tmp_path: Path) -> None:
    """Both the model in a checkpoint and one that is built of its state."""
    for step, theta in ((5, 10_000.0), (6, 160_000.0)):
        folder = straight / f"checkpoints/step-{step:08d}"
        export(folder, tmp_path / str(step))
        for model in (folder / "model", tmp_path / str(step)):
            config = json.loads((model / "config.json").read_text())
            assert config["rope_parameters"]["full_attention"]["rope_theta"] == theta
            assert config["local_attention"] == (8 if step == 5 else 16)
            loaded = ModernBertForMaskedLM.from_pretrained(model)
            powers = torch.arange(0, 8, 2) / 8
            assert torch.equal(loaded.model.rotary_emb.full_attention_inv_freq, 1.0 / theta**powers)


def test_the_model_that_trains_has_the_positions_of_the_phase(store: Path, validation_store: Path) -> None:
    """Compared with a Transformers model of the phase's config."""
    parameters = Parameters.from_dict(phased(store, validation_store), source="test")
    vocabulary = open_stores(parameters).vocabulary
    module = build_module(parameters, vocabulary)
    change_settings(module, lambda: build_module(parameters.of_phases[1], vocabulary))
    (model,) = top_level_models(module)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10.0)  # else attention is nearly even, wherever tokens are
    reference = ModernBertForMaskedLM(parameters.of_phases[1].architecture.config(vocabulary))
    reference.load_state_dict(model.state_dict())
    ids = torch.randint(5, vocabulary.size, (2, 64))
    got, expected = (each.eval()(input_ids=ids).logits for each in (model, reference))
    assert torch.equal(got, expected)
    ours, theirs = ([layer.attn.sliding_window for layer in each.model.layers] for each in (model, reference))
    assert ours == theirs and 9 in ours, "which packed rows read: half of the window, and the position itself"
    before = ModernBertForMaskedLM(parameters.architecture.config(vocabulary))
    before.load_state_dict(model.state_dict())
    assert not torch.allclose(before.eval()(input_ids=ids).logits, expected, atol=1e-5)


def test_a_store_is_read_on_where_it_was_when_rows_have_their_length_again(store: Path) -> None:
    """And anew in another length: no row of a length comes twice before all have come."""
    rows = [{"data": {"sequence_length": length}, "steps": 2} for length in (32, 64, 32)]
    parameters = Parameters.from_dict(
        toy.parameters(store, architecture=MODEL, max_steps=6, phases=rows), source="test"
    )
    loader = make_plan(parameters, open_stores(parameters), ALONE, 0).loader
    first, between, again = (loader.load(start, start + 32) for start in (0, 32, 64))
    assert between.tokens.shape[1] == 64
    keys = np.concatenate([first.keys, again.keys])
    assert len(np.unique(keys)) == 64
    whole = toy.parameters(store, architecture=MODEL, max_steps=4)
    undivided = Parameters.from_dict(whole, source="test")
    assert (make_plan(undivided, open_stores(undivided), ALONE, 0).loader.load(0, 64).keys == keys).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "steps"),
    at_night([(1, [6]), *((number, [4, 5, 6, 9, 10]) for number in (1, 2, 3))], always=[(1, [6])]),
)
def test_killed_around_borders_the_run_goes_on_bit_for_bit(
    processes: int, steps: list[int], store: Path, validation_store: Path, tmp_path: Path
) -> None:
    check_kills(phased(store, validation_store, nodes=processes), (1,) * processes, steps, tmp_path)


@pytest.mark.slow
def test_the_run_goes_on_with_other_processes_across_a_border(
    straight: Path, store: Path, validation_store: Path, tmp_path: Path
) -> None:
    """Two nodes with unequal shares from before the first border on: the rows and nearly the losses of one process."""
    out = tmp_path / "resumed"
    shutil.copytree(straight / "checkpoints/step-00000004", out / "checkpoints/step-00000004")
    output = toy.train(phased(store, validation_store, nodes=2), out, nodes=(1, 1))
    assert "parameter phases.1.batch_size" in output
    one, two = toy.losses(straight), toy.losses(out)
    assert two.keys() == set(range(5, 13))
    pairs = [pair for step in two for pair in zip(one[step], two[step], strict=True)]
    assert all(abs(mine - theirs) <= 1e-5 * abs(mine) for mine, theirs in pairs)
    assert relative_error(weights(straight, 12), weights(out, 12)) < 1e-4
    manifests = [json.loads((run / "checkpoints/step-00000012/manifest.json").read_text()) for run in (straight, out)]
    for key in ("consumed_rows", "consumed_tokens", "positions", "phase"):
        assert manifests[0][key] == manifests[1][key]


def test_status_and_checkpoints_name_the_phases(straight: Path) -> None:
    told = status.read(straight)
    assert told.phase == "3 of 3, decay: steps 10 to 12" and len(told.phases) == 3
    manifest = json.loads((straight / "checkpoints/step-00000006/manifest.json").read_text())
    read = Counter({each["store"]: 0 for each in manifest["positions"]})
    for each in manifest["positions"]:
        read[each["store"]] += each["rows"]
    assert sorted(read.values()) == [4, 82], "80 and 2 rows of the one store, 4 of the other"
    facts = ("number", "name", "first_step", "steps", "global_rows", "sequence_length")
    assert [tuple(phase[name] for name in facts) for phase in manifest["phases"][:2]] == [
        (1, "short rows", 0, 5, 16, 32), (2, "long rows", 5, 4, 6, 64),
    ]  # fmt: skip


@pytest.mark.nightly
def test_an_estimate_names_the_phases_and_takes_the_memory_of_the_largest(store: Path, validation_store: Path) -> None:
    events = {"permanent_checkpoints": {"every": 2}}
    parameters = Parameters.from_dict(phased(store, validation_store, micro_batch_size=5, events=events), source="test")
    phases = estimate_phases(parameters, vocab_size=None, processes=1, tflops=0.001)
    assert [(each.name, each.estimate.steps) for each in phases] == [("short rows", 5), ("long rows", 4), ("decay", 3)]
    run = whole_run(phases, parameters)
    assert run.disk == (20 + 6 + 1) * sum(run.checkpoint.values()), "keep, those of 12 steps, one in progress"
    assert run.memory.peak == max(each.estimate.memory.peak for each in phases)
    hours = [each.estimate.hours for each in phases if each.estimate.hours is not None]
    assert run.steps == 12 and run.hours == (sum(low for low, _ in hours), sum(high for _, high in hours))
    assert len(hours) == 3 and min(run.hours) > 0
    assert run.flops == sum(each.estimate.flops or 0 for each in phases)


LENGTHS = {128: 32, 1024: 32, 512: 64, 8192: 64}
ROWS = {768: 3, 2048: 7, 3328: 12, 4608: 16, 72: 4, 32: 16, 8: 4}


def small(preset: str, store: Path) -> dict[str, Any]:
    """The preset with two steps a phase, at toy size, and one store; its phases change what they change there."""
    raw = json.loads((presets_folder() / f"{preset}.json").read_text(encoding="utf-8"))
    phases = [dict(phase) for phase in raw["phases"]]
    for phase in phases:
        for key in ("tokens", "share", "micro_batch_size"):
            phase.pop(key, None)
        if "data" in phase:
            phase["data"] = {"sequence_length": LENGTHS[phase["data"]["sequence_length"]]}
        if "batch_size" in phase:
            phase["batch_size"] = {"-1": ROWS[phase["batch_size"]["-1"]]}
        phase["steps"] = 2
    kept = {key: raw[key] for key in ("objective", "optimizer")}
    schedule = {"type": "constant", "warmup_steps": 2}
    assert raw["schedule"]["type"] == "constant"
    return toy.parameters(
        store, architecture=MODEL, schedule=schedule, max_steps=2 * len(phases), phases=phases, **kept
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", at_night(("modernbert_base_phases", "mmbert_base", "tiny_phases"), always=("mmbert_base",))
)
def test_a_preset_with_phases_trains_at_toy_size(preset: str, store: Path, tmp_path: Path) -> None:
    settings = small(preset, store)
    run = trained(settings, tmp_path / preset)
    names = [record["name"] for record in toy.records(run, "phase").values()]
    assert names == [phase["name"] for phase in settings["phases"]]
    rates, last = learning_rates(run), settings["max_steps"]
    stable, extended = settings["optimizer"]["learning_rate"], settings["phases"][-1]["optimizer"]["learning_rate"]
    assert rates[last - 4] == stable and rates[last - 3] == rates[last - 2] == rates[last - 1] == extended
    assert rates[last] == pytest.approx(extended * (1 - 0.5**0.5))
    folder = run / f"checkpoints/step-{last:08d}"
    config = json.loads((folder / "model/config.json").read_text())
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 160_000.0
    local = 160_000.0 if preset == "mmbert_base" else 10_000.0
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == local


@pytest.mark.nightly
def test_a_fork_of_a_run_with_phases_takes_the_same_steps(straight: Path, tmp_path: Path) -> None:
    """And with other phases ahead, for example a decay at once, its own."""
    fork(Path(f"{straight}@6"), tmp_path / "same")
    same = json.loads((tmp_path / "same/parameters.json").read_text())
    trained(same, tmp_path / "same")
    assert same_weights(tmp_path / "same", straight, 12)
    other = [dict(phase) for phase in same["phases"]]
    other[1]["steps"], other[2]["steps"] = 2, 1
    fork(Path(f"{straight}@6"), tmp_path / "decay", [f"phases={json.dumps(other)}", "max_steps=8"])
    trained(json.loads((tmp_path / "decay/parameters.json").read_text()), tmp_path / "decay")
    assert learning_rates(tmp_path / "decay") == {7: 0.003, 8: 0.005}
    with pytest.raises(UserError, match="phases began at steps 1, 6, but now they would have begun at 1: give"):
        other[0]["steps"] = 6
        fork(Path(f"{straight}@6"), tmp_path / "wrong", [f"phases={json.dumps(other)}", "max_steps=9"])
        trained(json.loads((tmp_path / "wrong/parameters.json").read_text()), tmp_path / "wrong")
