"""The architecture and the text of a run, trained by Transformers' `Trainer` with its usual recipe for as long.

    python tools/bench/showcase.py train PARAMETERS.json --seconds 4000 --out FOLDER
    python tools/bench/showcase.py measure PARAMETERS.json MODEL [MODEL ...]

`train` begins with random weights of the architecture and does what Transformers' `run_mlm.py` does: documents joined
and cut into blocks, 15 % of single tokens masked, logits at every position, AdamW with weight decay 0.01 and a linear
schedule. It takes as many steps as fit into the CPU seconds, by the speed of the first twenty, on one thread. With
`--checkpoints FOLDER` it can be stopped at any time, and the same command goes on from the last checkpoint. `measure`
prints loss and accuracy of finished models, ours or the peer's, on the same masked tokens of the run's validation text:
single ones, which is what the peer learns, and whole words, if that is what the run learns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

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
from terakoya.toolkit.formats import transformers_folder

SPEED_STEPS = 20


class CpuClock(TrainerCallback):
    """Counts the CPU seconds of training, also of the processes before this one up to the checkpoint that they left.

    Attributes:
        path: a JSON file in which a checkpoint keeps the seconds until it.
        seconds: CPU seconds of all steps that count.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds = 0.0
        self._noted = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Goes on from what the last checkpoint kept."""
        if self.path.exists():
            self.seconds = json.loads(self.path.read_text(encoding="utf-8"))
        self._noted = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Adds the seconds since the step before."""
        now = time.process_time()
        self.seconds, self._noted = self.seconds + now - self._noted, now

    def on_save(self, *_: Any, **__: Any) -> None:
        """Keeps the seconds beside the checkpoint."""
        self.path.write_text(json.dumps(self.seconds), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Trains or measures. Returns the exit status."""
    arguments = _arguments(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    raw = json.loads(arguments.parameters.read_text(encoding="utf-8"))
    if arguments.action == "train":
        train(raw, arguments)
        return 0
    raw["evaluation"] = {"steps": 1, "batches": arguments.batches}
    for whole_words in sorted({False, raw["objective"].get("whole_word_mask", False)}):
        raw["objective"]["whole_word_mask"] = whole_words
        batches = validation_batches(raw)
        for folder in arguments.models:
            model = AutoModelForMaskedLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            loss, accuracy = measure(model, batches)
            masks = "whole words" if whole_words else "single tokens"
            print(f"{folder}: {masks} masked, loss {loss:.3f}, {accuracy:.1%} right", flush=True)
    return 0


def train(raw: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Trains for the CPU seconds asked for and writes model and tokenizer to the folder."""
    store = TokenStore.open(Parameters.from_dict(raw, source=str(arguments.parameters)).data.train[0].store)
    tokenizer = AutoTokenizer.from_pretrained(store.tokenizer_folder, local_files_only=True, trust_remote_code=False)
    rows = Sequences(blocks(documents(store), raw["data"]["sequence_length"]))
    model = model_of(raw, store.facts.vocabulary)

    def trained(model: PreTrainedModel, steps: int, folder: Path, *, keep: bool) -> float:
        settings = TrainingArguments(
            str(folder),
            per_device_train_batch_size=arguments.batch_size,
            max_steps=steps,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=max(1, steps // 15),
            weight_decay=0.01,
            bf16=raw["precision"] == "bf16",
            use_cpu=True,
            logging_steps=100,
            save_strategy="steps" if keep else "no",
            save_steps=arguments.save_steps,
            save_total_limit=1,
            report_to="none",
            disable_tqdm=True,
            seed=raw.get("seed", 42),
        )
        masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
        clock = CpuClock(folder / "cpu_seconds.json")
        Trainer(model, settings, masking, rows, callbacks=[clock]).train(
            resume_from_checkpoint=get_last_checkpoint(str(folder))
        )
        return clock.seconds

    with tempfile.TemporaryDirectory() as temporary:
        kept = arguments.checkpoints or Path(temporary) / "run"
        kept.mkdir(parents=True, exist_ok=True)
        plan = kept / "steps.json"
        if not plan.exists():
            tried = trained(model_of(raw, store.facts.vocabulary), SPEED_STEPS, Path(temporary), keep=False)
            steps = max(1, int(arguments.seconds * SPEED_STEPS / tried))
            print(f"{SPEED_STEPS / tried:.3f} steps a CPU second: {steps:,} steps", flush=True)
            plan.write_text(json.dumps(steps), encoding="utf-8")
        steps = json.loads(plan.read_text(encoding="utf-8"))
        seconds = trained(model, steps, kept, keep=arguments.checkpoints is not None)
    tokens = steps * arguments.batch_size * raw["data"]["sequence_length"]
    print(f"{steps:,} steps, {tokens:,} tokens, {seconds:,.0f} CPU s")
    transformers_folder.write(model, store.tokenizer_folder, arguments.out)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    actions = parser.add_subparsers(dest="action", required=True)
    each = actions.add_parser("train")
    each.add_argument("parameters", type=Path, help="the parameter file of the run beside it")
    each.add_argument("--seconds", type=float, required=True, help="CPU seconds of training")
    each.add_argument("--out", type=Path, required=True, help="the folder for the model")
    each.add_argument("--learning-rate", type=float, default=1e-3)
    each.add_argument("--batch-size", type=int, default=32, help="rows of a step")
    each.add_argument("--checkpoints", type=Path, help="a folder for checkpoints, to stop and go on")
    each.add_argument("--save-steps", type=int, default=250, help="steps from one checkpoint to the next")
    each = actions.add_parser("measure")
    each.add_argument("parameters", type=Path)
    each.add_argument("models", type=Path, nargs="+")
    each.add_argument("--batches", type=int, default=20)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
