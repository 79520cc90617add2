"""`terakoya estimate --gpus N`: layouts that fit, the fastest first, and whether this program supports them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy
from typer.testing import CliRunner

from terakoya.checking.synthetic_rows import synthetic_vocabulary
from terakoya.commands.main import build_app
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya_clusters.layouts.cluster import Cluster, find_gpu
from terakoya_clusters.layouts.find_layouts import find_layouts
from terakoya_clusters.layouts.measured_model import measure_transformer
from terakoya_clusters.layouts.suggest import USABLE, batch_size_for, candidates, own_memory, refusal_reason, suggest
from terakoya_clusters.layouts.transformer import Transformer
from terakoya_planning.devices import GIB
from terakoya_planning.fake_step import BACKWARD, FORWARD, LATE_BACKWARD, STEP, Simulation

PRESETS = Path(__file__).parents[3] / "parameters"
pytestmark = pytest.mark.usefixtures("remembered_steps")


@pytest.fixture(scope="module")
def llama() -> Parameters:
    return Parameters.load(PRESETS / "llama_8b.json", ["precision=bf16"])


@pytest.fixture(scope="module")
def measured(llama: Parameters) -> tuple[Transformer, float]:
    return measure_transformer(llama, synthetic_vocabulary(65536, 2048), context=2048.0)


def test_the_model_of_a_run_is_measured(measured: tuple[Transformer, float]) -> None:
    model, state = measured
    h, f, v = 4096, 14336, 65536
    layer = 2 * h * h + 2 * h * 1024 + 3 * h * f + 2 * h
    assert model.layer_weights == layer and model.layers == 32
    assert model.parameters == 32 * layer + 2 * v * h + h
    assert model.flops == pytest.approx(6 * (32 * (layer - 2 * h) + v * h) + 12 * 32 * h * 1024)
    assert state == pytest.approx(8, rel=1e-3)  # two float32 moments
    assert model.weight_copies == pytest.approx(2, rel=0.01)  # autocast's copies, in bfloat16
    assert model.activations["full"] == 4 * h  # a layer's input, in float32
    assert model.activations["full"] < model.activations["selective"] < model.activations[None]
    assert model.gated and model.head_weights == v * h


def test_layouts_are_measured_with_the_attention_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 on a GPU takes flash, whose scratch depends on the documents of a row."""
    taken = []

    def note(*arguments: Any, documents_per_row: float | None, **named: Any) -> Simulation:
        taken.append(documents_per_row)
        windows = {each: {"activations": 1} for each in (FORWARD, BACKWARD, LATE_BACKWARD, STEP)}
        return Simulation(windows, 1, 1, depths=())

    monkeypatch.setattr("terakoya_planning.fake_step.simulate_step", note)
    small = Parameters.load(PRESETS / "tiny_llama.json", ["precision=fp32"])
    measure_transformer(small, synthetic_vocabulary(500, 64), context=64.0, documents_per_row=3.5)
    assert set(taken) == {3.5}


def test_suggestions_fit_are_supported_and_sorted(llama: Parameters, measured: tuple[Transformer, float]) -> None:
    model, state = measured
    cluster = Cluster(find_gpu("h100"), 64)
    found = suggest(llama, model, cluster, state=state, count=5)
    seconds = [each.time.seconds for each in found]
    assert seconds == sorted(seconds)
    # of 1,024 replicas a half has one row, where the others have two
    many = suggest(llama, model, Cluster(find_gpu("h100"), 1024), state=state, count=2)
    assert any(each.layout.rows > 1536 for each in many) and {each.time.tokens for each in many} == {1536 * 2048}
    runs = [each for each in found if each.refused is None]
    assert len(runs) == 5 and found == runs, "this program runs the fastest ones itself"
    for each in found:
        assert each.bytes <= USABLE * 80 * GIB
        assert each.layout.devices == 64
        assert each.layout.rows >= 1536 > each.layout.rows - each.layout.data * each.micro_batch_size
        raw = llama.dump() | {
            "parallel": dict(each.parallel), "micro_batch_size": each.micro_batch_size,
            "activation_checkpointing": each.activation_checkpointing,
        }  # fmt: skip
        Parameters.from_dict(raw, source="suggested")


def test_a_runs_own_layout_takes_what_it_takes_among_the_suggestions(
    llama: Parameters, measured: tuple[Transformer, float]
) -> None:
    model, state = measured
    cluster = Cluster(find_gpu("h100"), 64)
    for each in suggest(llama, model, cluster, state=state, count=5):
        raw = llama.dump() | {
            "parallel": dict(each.parallel), "micro_batch_size": each.micro_batch_size,
            "activation_checkpointing": each.activation_checkpointing,
        }  # fmt: skip
        own = Parameters.from_dict(raw, source="suggested")
        assert own_memory(own, model, cluster, state=state) == each.bytes
        assert own_memory(own, model, replace(cluster, gpus=1), state=state) is None, each.parallel


@pytest.mark.nightly
def test_runs_in_8_bits_are_measured_like_those_in_bf16(llama: Parameters, measured: tuple[Transformer, float]) -> None:
    raw = llama.dump() | {"precision": "fp8"}
    parameters = Parameters.from_dict(raw, source="test")
    model, state = measure_transformer(parameters, synthetic_vocabulary(65536, 2048), context=2048.0)
    assert (model.tensor_shares, model.position_shares) == (measured[0].tensor_shares, measured[0].position_shares)
    small = replace(find_gpu("h100"), memory=24 * GIB)
    found = suggest(parameters, model, Cluster(small, 64), state=state, count=3)
    assert any(each.parallel.get("tp_size", 1) > 1 and each.refused is None for each in found)


def test_layouts_that_settings_do_not_allow_are_said_to_be_refused(
    llama: Parameters, measured: tuple[Transformer, float]
) -> None:
    """The first stage of a pipeline would have frozen layers alone."""
    model, state = measured
    raw = llama.dump() | {"frozen_layers": 20}
    found = suggest(
        Parameters.from_dict(raw, source="test"), model, Cluster(find_gpu("h100"), 64), state=state, count=2
    )
    refused = [each for each in found if each.refused is not None]
    assert refused and len(refused) <= 2
    for each in refused:
        with pytest.raises(UserError):
            Parameters.from_dict({**raw, "parallel": dict(each.parallel)}, source="suggested")


def test_with_less_memory_layouts_are_fewer_and_slower(llama: Parameters, measured: tuple[Transformer, float]) -> None:
    model, state = measured
    wide, narrow = (replace(find_gpu("h100"), memory=size * GIB) for size in (80, 40))
    first, second = (suggest(llama, model, Cluster(each, 64), state=state, count=1)[-1] for each in (wide, narrow))
    assert second.time.seconds > first.time.seconds and second.bytes < USABLE * 40 * GIB < first.bytes
    with pytest.raises(UserError, match=r"--gpus 1: no layout fits into 79 GB of a h100; the smallest is .*: 1\d\d GB"):
        suggest(llama, model, Cluster(find_gpu("h100"), 1), state=state)
    with pytest.raises(UserError, match="fewer than the replicas"):
        few = llama.model_copy(update={"batch_size": {"-1": 1}})
        suggest(few, replace(model, layers=3, heads=3, key_value_heads=3), Cluster(find_gpu("h100"), 64), state=state)


def test_candidates_divide_heads_layers_and_rows_evenly(measured: tuple[Transformer, float]) -> None:
    model = measured[0]
    seen = set()
    for parallel, layout, _ in candidates(model, Cluster(find_gpu("h100"), 64), 1536, 8.0, "bf16"):
        seen.add(json.dumps(parallel))
        assert layout.devices == 64
        heads = layout.tensor * (1 if layout.keys_gathered else layout.sequence)
        assert layout.tensor * layout.sequence <= 8 and model.key_value_heads % heads == 0
        assert model.layers % (layout.pipeline * layout.virtual) == 0
        assert layout.rows >= 1536 > layout.rows - layout.data * layout.micro_batch_size
    odd = candidates(replace(model, sequence_length=2046), Cluster(find_gpu("h100"), 64), 1536, 8.0, "bf16")
    assert {(each.tensor, each.sequence) for _, each, _ in odd if each.norms_shared} == {(2, 1)}
    for parallel in (
        {"engine": "ddp"}, {"engine": "ddp", "tp_size": 8}, {"engine": "ddp", "sp_size": 4}, {"engine": "fsdp"},
        {"engine": "fsdp", "dp_shard_size": 8}, {"engine": "deepspeed", "zero_stage": 3},
        {"engine": "fsdp", "tp_size": 2}, {"engine": "fsdp", "tp_size": 2, "pp_size": 4},
        {"engine": "fsdp", "sp_size": 4}, {"engine": "fsdp", "cp_size": 8},
        {"engine": "fsdp", "tp_size": 2, "sequence_parallel": True},
        {"engine": "fsdp", "tp_size": 2, "sequence_parallel": True, "cp_size": 4},
        {"engine": "ddp", "tp_size": 4, "sequence_parallel": True, "pp_size": 2},
        {"engine": "ddp", "pp_size": 8, "pp_stages_per_process": 4},
    ):  # fmt: skip
        assert json.dumps(parallel) in seen, parallel


def test_every_layout_of_a_llama_can_be_run(llama: Parameters, measured: tuple[Transformer, float]) -> None:
    found = {
        json.dumps([parallel, layout.recomputation]): (parallel, layout)
        for parallel, layout, _ in candidates(measured[0], Cluster(find_gpu("h100"), 64), 1536, 8.0, "bf16")
    }
    reasons = {name: refusal_reason(llama, *each) for name, each in found.items()}
    assert sum('"cp_size"' in name for name in found) > 30 and sum('"sequence_parallel"' in name for name in found) > 30
    refused = {name for name, reason in reasons.items() if reason is not None}
    assert refused == {json.dumps([{"engine": "deepspeed", "zero_stage": 3}, "selective"])}


@pytest.mark.nightly
def test_rows_of_32_768_tokens_divide_positions(llama: Parameters, measured: tuple[Transformer, float]) -> None:
    """Eight rows on 64 GPUs: no layout of whole rows uses them all."""
    long = llama.dump() | {"batch_size": {"-1": 8}}
    long["data"] |= {"sequence_length": 32768}
    long["architecture"] |= {"max_position_embeddings": 32768}
    model = replace(measured[0], sequence_length=32768, context=16384.0, key_value_heads=1)
    found = suggest(Parameters.from_dict(long, source="long"), model, Cluster(find_gpu("h100"), 64))
    assert any(each.parallel.get("cp_size") for each in found)


def test_rows_are_divided_among_the_nodes(llama: Parameters) -> None:
    assert batch_size_for(Cluster(find_gpu("h100"), 8), llama.batch_size) == {"-1": 1536}
    assert batch_size_for(Cluster(find_gpu("h100"), 24), llama.batch_size) == {"0": 512, "1": 512, "2": 512}
    own = llama.model_copy(update={"batch_size": {"a01": 1000, "a02": 536}})
    assert batch_size_for(Cluster(find_gpu("h100"), 16), own.batch_size) == {"a01": 1000, "a02": 536}
    assert sum(batch_size_for(Cluster(find_gpu("h100"), 56), own.batch_size).values()) == 1536


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[Transformer]:
    """The models that commands have measured; one that was measured before is not measured again."""
    found: dict[str, tuple[Transformer, float]] = {}
    measured: list[Transformer] = []

    def measure_once(parameters: Parameters, vocabulary: Vocabulary, **rows: float) -> tuple[Transformer, float]:
        key = f"{parameters.model_dump_json()} {vocabulary!r} {rows}"
        if key not in found:
            found[key] = measure_transformer(parameters, vocabulary, **rows)
        measured.append(found[key][0])
        return found[key]

    monkeypatch.setattr("terakoya_clusters.layouts.find_layouts.measure_transformer", measure_once)
    return measured


def run(*arguments: str) -> str:
    """Returns the output of the command line."""
    done = CliRunner().invoke(build_app(), ["estimate", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.nightly
def test_the_command_prints_a_table_and_parameters(models: list[Transformer]) -> None:
    arguments = [str(PRESETS / "tiny_gpt2.json"), "--vocab-size", "5000", "--gpus", "16", "--gpu", "a100-40gb"]
    said = run(*arguments)
    assert "layouts over 16 x a100-40gb, 8 on a node, fastest first (not validated on hardware" in said
    keys = said.rsplit("to write into the parameters:\n", 1)[1].partition("next: terakoya train ")[0]
    written = json.loads("{" + keys.replace("\n", " ").strip() + "}")
    assert set(written) == {"parallel", "micro_batch_size", "activation_checkpointing", "batch_size"}
    assert written["batch_size"] == {"0": 16, "1": 16}
    raw = json.loads((PRESETS / "tiny_gpt2.json").read_text())
    Parameters.from_dict({**raw, **written}, source="written")
    found = json.loads(run(*arguments, "--gpus-per-node", "4", "--json"))
    assert found["processes"] == 16 and found["layouts"][0]["write"]["batch_size"] == {str(n): 8 for n in range(4)}
    first = found["layouts"][0]
    assert first["tokens_per_second"] == pytest.approx(32 * 256 / first["seconds_per_step"])
    assert first["hours"] == pytest.approx(2000 * first["seconds_per_step"] / 3600)
    assert len(models) == 2 and models[0] is models[1]


@pytest.mark.nightly
def test_the_hours_of_a_run_with_phases_are_the_sum_of_theirs() -> None:
    """Layouts are those of the rows outside of phases, so they say nothing about the whole run."""
    found = json.loads(
        run(str(PRESETS / "tiny_phases.json"), "--vocab-size", "5000", "--gpus", "8", "--gpu", "h100", "--json")
    )
    assert found["layouts"] and {each["hours"] for each in found["layouts"]} == {None}
    assert found["hours"] == pytest.approx([sum(phase["hours"][end] for phase in found["phases"]) for end in (0, 1)])


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["tiny_bert", "tiny_electra"])
def test_attention_dropout_and_two_models_have_layouts_and_one_time(preset: str, models: list[Transformer]) -> None:
    """Recomputed blocks with attention dropout once ended in a traceback; a generator is part of the step."""
    found = json.loads(
        run(str(PRESETS / f"{preset}.json"), "--vocab-size", "5000", "--gpus", "8", "--gpu", "h100", "--json")
    )
    fastest = next(each for each in found["layouts"] if each["refused"] is None)
    assert found["hours"] == [fastest["hours"]] * 2 and found["speed"]["source"] == "formulas"
    (model,) = models
    assert 0 < model.head_share < 1


@pytest.mark.nightly
@pytest.mark.parametrize("gpus", [1, 32])
@pytest.mark.parametrize("preset", [each.stem for each in sorted(PRESETS.glob("*.json")) if each.stem != "parameter"])
def test_every_preset_has_layouts_or_is_refused_in_words(preset: str, gpus: int) -> None:
    file = PRESETS / f"{preset}.json"
    refused = {"t5_base": "equal layers", "tiny_t5": "equal layers", "tiny_lora": "train all weights"}
    if preset in refused:
        with pytest.raises(UserError, match=refused[preset]):
            find_layouts(file, gpus, gpu="h100", vocab_size=32768)
        return
    if gpus == 1 and preset in ("gptj_6b", "llama_8b"):
        with pytest.raises(UserError, match="no layout fits into 79 GB of a h100"):
            find_layouts(file, gpus, gpu="h100", vocab_size=32768)
        return
    found = find_layouts(file, gpus, gpu="h100", vocab_size=32768)
    if found.fastest_supported is None:  # more GPUs than rows
        assert sum(found.batch_size.values()) < gpus and all(each.refused for each in found.suggestions)
        return
    assert 0 < found.fastest_supported.time.mfu < 0.7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "8", "--processes", "8"], "give one of them"),
        (["--gpus", "8", "--gpu", "l4"], "--gpu: expected h100"),
        (["--gpus", "8", "--set", "frozen_layers=1"], "train all weights"),
    ],
)
def test_options_without_suggestions_are_errors(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(
        build_app(), ["estimate", str(PRESETS / "tiny_gpt2.json"), "--vocab-size", "5000", *arguments]
    )
    assert done.exit_code != 0
    assert said in str(done.exception) + done.output


def test_layers_that_are_not_equal_are_refused() -> None:
    with pytest.raises(UserError, match="not made of equal layers"):
        measure_transformer(Parameters.load(PRESETS / "tiny_t5.json"), synthetic_vocabulary(500, 64), context=64.0)


@pytest.mark.nightly
def test_an_estimate_is_for_the_nodes_of_its_gpus(tmp_path: Path) -> None:
    store = toy.make_store(tmp_path / "store", documents=20, seed=1)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(store, batch_size={"*": 8})))
    assert find_layouts(file, 4, per_node=2, gpu="h100").batch_size == {"0": 8, "1": 8}
