"""A snapshot of the state stays the same while training continues; slow writing does not time a process out."""

import json
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import toy
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from terakoya.distributed import all_ranks
from terakoya.distributed.all_ranks import Shutdown, run_on_all_ranks
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.topology import ProcessInfo, Topology
from terakoya.training.checkpoint.snapshot import Snapshot
from terakoya.training.engines.ddp import DDPEngine, StepOptions
from terakoya.training.engines.tensor_shards import KINDS, whole_shard


def engine() -> DDPEngine:
    """A small network on one process."""
    torch.manual_seed(0)
    context = DistributedContext(0, 1, torch.device("cpu"), Topology((ProcessInfo(0, 0, 0, "here"),)), None, None)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    return DDPEngine(context, module, optimizer, StepOptions(max_grad_norm=1.0))


def step(trained: DDPEngine) -> None:
    trained.module(torch.randn(8, 4)).square().sum().backward()
    trained.step(0.1)


def test_a_snapshot_stays_the_same_and_its_memory_is_reused() -> None:
    trained, snapshot = engine(), Snapshot(threading.Event())
    step(trained)
    before = {(kind, shard.name): shard.value.clone() for kind in KINDS for shard in trained.shards_to_save(kind)}
    snapshot.take(trained)
    step(trained)
    copied = {(kind, shard.name): shard.value for kind in KINDS for shard in snapshot.shards_to_save(kind)}
    assert copied.keys() == before.keys() and len(before) == 4 + 3 * 4
    assert all(torch.equal(copied[key], before[key]) for key in before)
    addresses = {key: value.data_ptr() for key, value in copied.items()}
    snapshot.take(trained)
    again = {(kind, shard.name): shard.value for kind in KINDS for shard in snapshot.shards_to_save(kind)}
    assert {key: value.data_ptr() for key, value in again.items()} == addresses
    now = {(kind, shard.name): shard.value for kind in KINDS for shard in trained.shards_to_save(kind)}
    assert all(torch.equal(again[key], now[key]) for key in now)
    assert any(not torch.equal(again[key], before[key]) for key in before)


def test_models_are_written_as_they_were_copied_with_tied_weights_once(tmp_path: Path) -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForMaskedLM(BertConfig(**shape, vocab_size=20))
    model.save_pretrained(tmp_path / "direct")
    write = Snapshot(threading.Event()).copy_models({"a": model})
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    write(tmp_path)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "model/a" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()
    assert "cls.predictions.decoder.weight" not in load_file(tmp_path / "model/a/model.safetensors")


def test_a_model_is_written_with_the_config_that_it_had_when_it_was_copied(tmp_path: Path) -> None:
    """The next phase may give the run's model other rotary positions before the file is written."""
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=20, rope_parameters={"rope_theta": 10_000.0}))
    write = Snapshot(threading.Event()).copy_models({"a": model})
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 160_000.0}
    write(tmp_path)
    assert json.loads((tmp_path / "model/a/config.json").read_text())["rope_parameters"]["rope_theta"] == 10_000.0
    assert model.config.rope_parameters["rope_theta"] == 160_000.0


def test_tensors_of_event_plugins_are_copied() -> None:
    average = torch.ones(3)
    copies = Snapshot(threading.Event()).copy_tensors({"ema": [whole_shard("a", average)]})
    average.zero_()
    assert [(each.name, each.value.tolist()) for each in copies["ema"]] == [("a", [1, 1, 1])]


def test_reading_a_snapshot_ends_at_a_shutdown() -> None:
    trained, shutdown = engine(), threading.Event()
    snapshot = Snapshot(shutdown)
    snapshot.take(trained)
    shards = iter(snapshot.shards_to_save("model"))
    next(shards)
    shutdown.set()
    with pytest.raises(Shutdown):
        next(shards)


def work_longer_than_the_timeout(rank: int, meeting: Path, out: Path) -> None:
    """One of two processes; the second works for longer than the group's timeout."""
    all_ranks.HEARTBEAT_SECONDS = 0.1
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    topology = Topology((ProcessInfo(0, 0, 0, "here"), ProcessInfo(1, 0, 1, "here")))
    context = DistributedContext(rank, 2, torch.device("cpu"), topology, dist.group.WORLD, None).new_group(3.0)

    def work() -> int:
        time.sleep(4.0 * rank)
        return rank + 7

    results = run_on_all_ranks(context, "sleeping", work)
    (out / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.mark.slow
def test_work_may_take_longer_than_the_timeout_of_waiting_ranks(tmp_path: Path) -> None:
    started = [toy.fork(work_longer_than_the_timeout, rank, tmp_path / "meeting", tmp_path) for rank in range(2)]
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0, 0]
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[7, 8]] * 2
