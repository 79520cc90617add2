"""Goes the roads to a GPU on fake_cuda's machine, whole.

Nothing is compiled. What threads would do, which do not see the machine, is done at once. Files are written with zeros.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Generic, TypeVar
from unittest import mock

import fake_cuda
import labelled_examples
import torch
import toy
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

import terakoya
from terakoya.corpus.corpus import Corpus
from terakoya.training.checkpoint.state import StoredTensors
from terakoya_checks.diagnose import diagnose
from terakoya_contract import toy as toy_model
from terakoya_inference.commands.try_model import TryOptions, try_texts

T = TypeVar("T")
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32, "hidden_size": 16}
RUNS: Mapping[str, Mapping[str, Any]] = {
    "bert": {
        "architecture": {"type": "bert", **SIZES, "intermediate_size": 32, "attention_probs_dropout_prob": 0.0},
        "events": {"ema": {}, "samples": {"texts": ["w1 [MASK] [MASK]"]}},
    },
    "gpt2": {
        "architecture": {"type": "gpt2", **SIZES}, "objective": {"type": "causal_lm"},
        "events": {"samples": {"texts": ["w1 w2"], "max_new_tokens": 3}},
    },
}  # fmt: skip
"""Settings of runs by name: one with flash, one with a mask and dropout."""
TUNING = {"learning_rates": (1e-2,), "epochs": (1,), "batch_size": 8, "seeds": 1}
TEXT = "kami ton [MASK]"
SUITE = """
name: Toys
url: https://example.com/toys
settings: {learning_rates: [1e-2], epochs: [1], batch_size: 8, seeds: 1, max_length: 16}
tasks:
  toy_labels:
    title: Toy labels
    task: classification
    files: {train: train.json, eval: eval.json}
    scores: [accuracy]
"""


class ReadsNow(Generic[T]):
    """Takes a `Prefetcher`'s place without a thread."""

    def __init__(self, function: Callable[[int], T], first_step: int, *, last_step: int | None = None) -> None:
        self.function, self.step, self.last_step = function, first_step, last_step

    def __enter__(self) -> ReadsNow[T]:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self.step == self.last_step:
            raise StopIteration
        self.step += 1
        return self.function(self.step - 1)


class CallsNow:
    """Takes a `ThreadPoolExecutor`'s place without a thread."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., T], *arguments: Any, **named: Any) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(function(*arguments, **named))
        return done

    def shutdown(self, *, wait: bool) -> None:
        pass


def write_zeros(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Takes the place of safetensors' `save_file`."""
    assert {each.device.type for each in tensors.values()} <= {"cpu"}
    with unset_fake_temporarily():
        zeros = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in tensors.items()}
        save_file(zeros, path, metadata)


def write_model(model: PreTrainedModel, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Takes the place of `model_folder.write`."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    assert state is not None, "weights are copied before the thread writes them"
    write_zeros(state, folder / "model.safetensors")


def load_really(load: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Loads a model whose weights exist, on the host."""
    with unset_fake_temporarily():
        return load(*arguments, **named)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """While open, this process has neither threads nor values to write."""
    load = PreTrainedModel.from_pretrained
    places: dict[str, Any] = {
        "terakoya.training.trainer.Prefetcher": ReadsNow,
        "terakoya.training.validation.Prefetcher": ReadsNow,
        "terakoya.training.saving.ThreadPoolExecutor": CallsNow,
        "terakoya.training.checkpoint.state.save_file": write_zeros,
        "terakoya.toolkit.formats.model_folder.write": write_model,
        "terakoya_quality.finetuning.finetune.write_model": lambda *_: None,
    }
    with contextlib.ExitStack() as stack:
        for place, stand_in in places.items():
            stack.enter_context(mock.patch(place, stand_in))
        for name in ("__call__", "part"):
            really = partialmethod(partial(load_really, getattr(StoredTensors, name)))
            stack.enter_context(mock.patch.object(StoredTensors, name, really))
        by_class = classmethod(lambda kind, *rest, **named: load_really(partial(load.__func__, kind), *rest, **named))  # type: ignore[attr-defined]
        stack.enter_context(mock.patch.object(PreTrainedModel, "from_pretrained", by_class))
        stack.enter_context(mock.patch.object(nn.Module, "load_state_dict", lambda *_, **__: None))
        yield


def make(folder: Path) -> None:
    """Writes what roads begin at, on this machine."""
    (folder / "toy").mkdir()
    toy_model.make_store(folder / "toy", documents=300)
    masked = labelled_examples.make_model(folder / "masked")
    PreTrainedTokenizerFast.from_pretrained(masked).save_pretrained(folder / "causal")
    GPT2LMHeadModel(GPT2Config(vocab_size=15, n_embd=8, n_layer=1, n_head=2, n_positions=24)).save_pretrained(
        folder / "causal"
    )
    for seed, name in enumerate(("train", "eval")):
        labelled_examples.write(folder / f"data/{name}.json", labelled_examples.classified(24, seed))
    (folder / "data/lines.txt").write_text("kami ton kato\nnemi saru\n")
    (folder / "suite.yaml").write_text(SUITE)


def train(folder: Path, name: str) -> None:
    """Six steps, of which 1, 3 and 6 are logged, and 3 and 6 validated and saved."""
    store = folder / "toy/store"
    settings = toy.parameters(
        store, store, max_steps=6, logging_steps=3, precision="bf16", micro_batch_size=16, compile="off",
        fused_kernels="off", checkpoint={"save_steps": 3, "async_save": True}, evaluation={"steps": 3, "batches": 2},
        **RUNS[name],
    )  # fmt: skip
    terakoya.train(settings, folder / name)


def resume(folder: Path, name: str) -> None:
    """Takes a run's last three steps once more."""
    shutil.rmtree(folder / name / "checkpoints/step-00000006")
    train(folder, name)


def evaluate_texts(folder: Path, kind: str) -> None:
    terakoya.evaluate(folder / kind, corpora={"lines": Corpus([folder / "data/lines.txt"])}, batch_tokens=16)


def finetune(folder: Path) -> None:
    terakoya.finetune(
        folder / "masked", folder / "tuned", task="classification", train=folder / "data/train.json",
        eval=folder / "data/eval.json", **TUNING,
    )  # fmt: skip


ROADS: Mapping[str, Callable[[Path], object]] = {
    "train": partial(train, name="bert"),
    "resume": partial(resume, name="bert"),
    "train causal": partial(train, name="gpt2"),
    "evaluate objective": lambda folder: terakoya.evaluate(folder / "bert", batch_tokens=64),
    "evaluate perplexity": lambda folder: evaluate_texts(folder, "causal"),
    "evaluate pseudo-perplexity": lambda folder: evaluate_texts(folder, "masked"),
    "evaluate tasks": lambda folder: terakoya.evaluate(
        folder / "masked", tasks=[str(folder / "suite.yaml")], stores=[folder / "data"]
    ),
    "finetune": finetune,
    "try masked": lambda folder: try_texts(TryOptions(folder=folder / "masked", texts=[TEXT])),
    "try causal": lambda folder: try_texts(TryOptions(folder=folder / "causal", texts=["kami ton"], max_new_tokens=2)),
    "doctor": lambda folder: diagnose(folder),
}


PARTS = {
    "step_log._write_record": "log", "validation.validate": "validation", "trainer._save": "save",
    "plugin_events.call": "event", "step_health.losses": "vote", "resume.resume": "resume",
    "restoring.restore_module": "load",
}  # fmt: skip
"""Where a run may wait for the device, by the function that begins it."""


def place(callers: Sequence[str]) -> str:
    """Where the host waited: the part of the run, if it is one of PARTS, and the function."""
    part = next((PARTS[each] for each in callers if each in PARTS), "")
    return f"{part}: {callers[0]}" if part else callers[0]


def go(folder: Path) -> dict[str, Any]:
    """How often the host waits in each road, from the new `folder`, by place, and the device's seeds."""
    folder.mkdir()
    make(folder)
    found = {}
    for name, road in ROADS.items():
        with fake_cuda.machine() as machine, stand_ins():
            road(folder)
            found[name] = {"waits": Counter(map(place, machine.callers)), "seeds": machine.seeds}
    return found
