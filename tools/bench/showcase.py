"""The architecture and the text of a run, trained by Transformers' `Trainer` with its usual recipe for as long.

    python tools/bench/showcase.py ours PARAMETERS.json --seconds 4000 --out RUN
    python tools/bench/showcase.py train PARAMETERS.json --seconds 4000 --out FOLDER
    python tools/bench/showcase.py measure PARAMETERS.json MODEL [MODEL ...]

`ours` is `terakoya train` with as many steps as fit into the seconds, by the speed of a short run before it.

`train` begins with random weights of the architecture and does what Transformers' `run_mlm.py` does: documents joined
and cut into blocks, 15 % of single tokens masked, logits at every position, AdamW with weight decay 0.01 and a linear
schedule. It takes as many steps as fit into the seconds, by the speed of the first ones. With `--checkpoints FOLDER` it
can be stopped at any time, and the same command goes on from the last checkpoint. Seconds are those of the CPU, on one
thread; with `--gpu` they are those of the clock, the model is compiled, and four processes mask its batches.

`measure` prints loss and accuracy of finished models, ours or the peer's, on the same masked tokens of the run's
validation text: single ones, which is what the peer learns, and whole words, if that is what the run learns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ours
import torch
import transformers
from peer import Sequences, blocks, model_of
from time_to_loss import documents, measure, validation_batches
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from terakoya.config.parameters import Parameters
from terakoya.store.token_store import TokenStore
from terakoya.toolkit.fast_products import fastest_precision
from terakoya.toolkit.formats import transformers_folder

SPEED_STEPS, GPU_SPEED_STEPS = 20, 100
"""Steps that tell the speed, on a CPU and on a GPU."""
WARM_UP, GPU_WARM_UP = 5, 10
"""The first steps, which tell no speed: memory is found in them. On a GPU they do not count at all, as the model is
compiled in them."""
GPU_LOADERS = 4
"""Processes that mask the peer's batches beside a GPU: one is slower than the card."""


class SpentClock(TrainerCallback):
    """Counts the seconds of training, also of the processes before this one up to the checkpoint that they left.

    Attributes:
        path: a JSON file in which a checkpoint keeps the seconds until it.
        seconds: those of all steps that count.
    """

    def __init__(self, path: Path, *, gpu: bool, warm_up: int = 0) -> None:
        self.path = path
        self.seconds = 0.0
        self._now: Callable[[], float] = _gpu_time if gpu else time.process_time
        self._warm_up, self._steps, self._noted = warm_up, 0, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Goes on from what the last checkpoint kept."""
        if self.path.exists():
            self.seconds = json.loads(self.path.read_text(encoding="utf-8"))
        self._noted = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Adds the seconds since the step before, unless it was for warming up."""
        now = self._now()
        self._steps += 1
        if self._steps > self._warm_up:
            self.seconds += now - self._noted
        self._noted = now

    def on_save(self, *_: Any, **__: Any) -> None:
        """Keeps the seconds beside the checkpoint."""
        self.path.write_text(json.dumps(self.seconds), encoding="utf-8")


def _gpu_time() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def main(argv: list[str] | None = None) -> int:
    """Trains or measures. Returns the exit status."""
    arguments = _arguments(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    raw = json.loads(arguments.parameters.read_text(encoding="utf-8"))
    device = torch.device("cuda" if arguments.gpu else "cpu")
    if raw["precision"] == "auto":
        raw["precision"] = fastest_precision(device)
    if arguments.action == "ours":
        return train_ours(raw, arguments)
    if arguments.action == "train":
        train(raw, arguments)
        return 0
    raw["evaluation"] = {"steps": 1, "batches": arguments.batches}
    for whole_words in sorted({False, raw["objective"].get("whole_word_mask", False)}):
        raw["objective"]["whole_word_mask"] = whole_words
        batches = [{name: each.to(device) for name, each in batch.items()} for batch in validation_batches(raw)]
        for folder in arguments.models:
            model = AutoModelForMaskedLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            model.to(device)
            loss, accuracy = measure(model, batches)
            masks = "whole words" if whole_words else "single tokens"
            print(f"{folder}: {masks} masked, loss {loss:.3f}, {accuracy:.1%} right", flush=True)
    return 0


def train_ours(raw: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    """Runs `terakoya train` with the steps that fit into the seconds asked for. Returns its exit status."""
    short = {**raw, "schedule": {"type": "constant"}, "checkpoint": {"model": "never"}, "trackers": []}
    short.pop("evaluation", None)
    count = GPU_SPEED_STEPS if arguments.gpu else SPEED_STEPS
    tried = ours.train(0, short, steps=count, warm_up=GPU_WARM_UP if arguments.gpu else WARM_UP)
    speed = count / sum(step.wall if arguments.gpu else step.cpu for step in tried.steps)
    steps = max(1, int(arguments.seconds * speed))
    print(f"{speed:.3f} steps a second: {steps:,} steps", flush=True)
    gc.collect()
    if arguments.gpu:
        torch.cuda.empty_cache()  # for the run, which is another process
    command = [sys.executable, "-m", "terakoya", "train", str(arguments.parameters), "--out", str(arguments.out)]
    return subprocess.run([*command, "--set", f"max_steps={steps}"]).returncode


def train(raw: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Trains for the seconds asked for and writes model and tokenizer to the folder."""
    store = TokenStore.open(Parameters.from_dict(raw, source=str(arguments.parameters)).data.train[0].store)
    tokenizer = AutoTokenizer.from_pretrained(store.tokenizer_folder, local_files_only=True, trust_remote_code=False)
    rows = Sequences(blocks(documents(store), raw["data"]["sequence_length"]))
    model = model_of(raw, store.facts.vocabulary)

    def trained(model: PreTrainedModel, steps: int, folder: Path, *, keep: bool, warm_up: int = 0) -> float:
        settings = TrainingArguments(
            str(folder),
            per_device_train_batch_size=arguments.batch_size,
            max_steps=steps,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=max(1, steps // 15),
            weight_decay=0.01,
            bf16=raw["precision"] == "bf16",
            use_cpu=not arguments.gpu,
            torch_compile=arguments.gpu,
            dataloader_num_workers=GPU_LOADERS if arguments.gpu else 0,
            logging_steps=100,
            save_strategy="steps" if keep else "no",
            save_steps=arguments.save_steps,
            save_total_limit=1,
            report_to="none",
            disable_tqdm=True,
            seed=raw.get("seed", 42),
        )
        masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
        clock = SpentClock(folder / "cpu_seconds.json", gpu=arguments.gpu, warm_up=warm_up)
        Trainer(model, settings, masking, rows, callbacks=[clock]).train(
            resume_from_checkpoint=get_last_checkpoint(str(folder))
        )
        return clock.seconds

    warm_up, count = (GPU_WARM_UP, GPU_SPEED_STEPS) if arguments.gpu else (WARM_UP, SPEED_STEPS)
    with tempfile.TemporaryDirectory() as temporary:
        kept = arguments.checkpoints or Path(temporary) / "run"
        kept.mkdir(parents=True, exist_ok=True)
        plan = kept / "steps.json"
        if not plan.exists():
            other = model_of(raw, store.facts.vocabulary)
            tried = trained(other, warm_up + count, Path(temporary), keep=False, warm_up=warm_up)
            steps = max(1, int(arguments.seconds * count / tried))
            print(f"{count / tried:.3f} steps a second: {steps:,} steps", flush=True)
            plan.write_text(json.dumps(steps), encoding="utf-8")
        steps = json.loads(plan.read_text(encoding="utf-8"))
        left_out = warm_up if arguments.gpu else 0
        seconds = trained(model, steps, kept, keep=arguments.checkpoints is not None, warm_up=left_out)
    tokens = steps * arguments.batch_size * raw["data"]["sequence_length"]
    print(f"{steps:,} steps, {tokens:,} tokens, {seconds:,.0f} s{' but for the first steps' if left_out else ''}")
    transformers_folder.write(model, store.tokenizer_folder, arguments.out)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    actions = parser.add_subparsers(dest="action", required=True)
    for name in ("ours", "train"):
        each = actions.add_parser(name)
        each.add_argument("parameters", type=Path, help="the parameter file, of which both sides have the architecture")
        each.add_argument("--seconds", type=float, required=True, help="seconds of training")
        each.add_argument("--gpu", action="store_true", help="on a GPU: seconds of the clock, compiled")
        each.add_argument("--out", type=Path, required=True, help="the folder for our run, or for the peer's model")
    each.add_argument("--learning-rate", type=float, default=1e-3)
    each.add_argument("--batch-size", type=int, default=32, help="rows of a step")
    each.add_argument("--checkpoints", type=Path, help="a folder for checkpoints, to stop and go on")
    each.add_argument("--save-steps", type=int, default=250, help="steps from one checkpoint to the next")
    each = actions.add_parser("measure")
    each.add_argument("parameters", type=Path)
    each.add_argument("models", type=Path, nargs="+")
    each.add_argument("--batches", type=int, default=20)
    each.add_argument("--gpu", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
