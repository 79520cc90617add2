"""Fine-tunes a finished model on a user's files, and writes a folder with its head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from terakoya.atomic_files import check_new_folder, new_folder
from terakoya.errors import UserError, nearest
from terakoya.inference.loading import find_device
from terakoya.places import as_fields
from terakoya_quality.finetuning.kinds import KINDS
from terakoya_quality.finetuning.model import ModelUse, finished_model, load_with_head, write_model
from terakoya_quality.finetuning.options import FinetuneOptions
from terakoya_quality.finetuning.rows import read_rows
from terakoya_quality.finetuning.scores import write_scores
from terakoya_quality.finetuning.search import Callbacks, SearchResult, search


def finetune(source: Path | str, out: Path | str, **options: Any) -> SearchResult:
    """Fine-tunes the model in `source`, a Transformers folder, a checkpoint or a run, and writes the folder `out`.

    `out` has the model of the best seed with its head, the tokenizer, and the scores in `terakoya_scores.json`,
    with the `limit`. `options` are the other fields of `FinetuneOptions`, of which `task`, `train` and `eval` are
    required.

    Raises:
        UserError: the files, the task and the model do not fit together.
    """
    return finetune_model(FinetuneOptions(**as_fields(FinetuneOptions, {"source": source, "out": out, **options})))


def finetune_model(options: FinetuneOptions) -> SearchResult:
    """Does what `options` say, as `finetune`."""
    if options.task not in KINDS:
        raise UserError(f"--task {options.task}: expected a kind of task{nearest(options.task, KINDS)}")
    settings = options.settings
    check_new_folder(options.out)
    files = {"train": options.train, "eval": options.eval, **({} if options.test is None else {"test": options.test})}
    sets = {name: read_rows(file, columns=dict(options.columns), limit=options.limit) for name, file in files.items()}
    device = find_device(options.device, precision=options.precision or "fp32")
    use = ModelUse.for_training(device, options.precision, trust=options.trust_remote_code)
    with finished_model(options.source) as folder:
        result = search(
            folder, KINDS[options.task], sets, settings, use=use, watch=Callbacks(options.report, options.progress)
        )
        with torch.random.fork_rng(devices=[]), new_folder(options.out) as draft:
            model = load_with_head(folder, result.task, seed=1, trust=use.trust, pad=result.pad)
            model.load_state_dict(result.best_weights)
            write_model(model, folder, draft)
            scores = {options.eval.name: {**result.as_json(), "limit": options.limit}}
            write_scores(draft, options.source, scores, settings={"precision": use.precision})
    return result
