"""Tasks of the Language Model Evaluation Harness (`lm-eval`), if it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from terakoya.errors import UserError, import_extra
from terakoya_evaluation.result import Numbers
from terakoya_quality.evaluation.options import TaskOptions
from terakoya_quality.finetuning.suites import suggest_suites


def check_installed(tasks: Sequence[str]) -> None:
    """Raises UserError if the harness, which is to have `tasks`, is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        if near := suggest_suites(tasks):
            raise UserError(
                f"--tasks {','.join(tasks)}: no such suite or task{near} A task of lm-eval needs the extra "
                '"evaluate": pip install "terakoya[evaluate]"'
            )
        import_extra("lm_eval", "evaluate", "--tasks")


def measure_tasks(options: TaskOptions, checkpoint: Path | None, device: torch.device) -> Mapping[str, Numbers]:
    """Returns the harness's numbers for the causal model in `checkpoint`, or else in the options' Transformers folder,
    by task and metric.

    The harness downloads the tasks' data sets, or reads them from its cache.

    Raises:
        UserError: the harness does not have a task, or the folder holds no Transformers model.
    """
    folder = tokenizer = options.source
    if checkpoint is not None:
        folder, tokenizer = checkpoint / "model", checkpoint / "tokenizer"
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no Transformers folder for lm-eval; write one with `terakoya export`")
    import lm_eval

    arguments = {
        "pretrained": str(folder),
        "tokenizer": str(tokenizer if (tokenizer / "tokenizer_config.json").is_file() else folder),
        "dtype": "bfloat16" if options.precision == "bf16" else "float32",
        "trust_remote_code": options.trust_remote_code,
    }
    tasks = list(options.tasks)
    try:
        output = lm_eval.simple_evaluate(
            model="hf", model_args=arguments, tasks=tasks, limit=options.limit, device=str(device), log_samples=False
        )
    except (KeyError, ValueError) as error:
        raise UserError(f"--tasks {','.join(tasks)}: lm-eval refuses: {error}{suggest_suites(tasks)}") from error
    results = (output or {}).get("results", {})
    return {
        task: {name: value for name, value in numbers.items() if isinstance(value, int | float)}
        for task, numbers in results.items()
    }
