"""Tasks of the Language Model Evaluation Harness (`lm-eval`), if it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from terakoya.errors import UserError
from terakoya_quality.finetuning.suites import suggest_suites


def check_installed(tasks: Sequence[str]) -> None:
    """Raises UserError if the harness, which is to have `tasks`, is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        if near := suggest_suites(tasks):
            raise UserError(
                f"--tasks {','.join(tasks)}: no such suite or task{near} A task of lm-eval needs the extra "
                '"evaluate": pip install "terakoya[evaluate]"'
            )
        raise UserError(
            '--tasks: lm-eval is not installed; expected the extra "evaluate": pip install "terakoya[evaluate]"'
        )


def evaluate(
    model: Path,
    tokenizer: Path,
    tasks: Sequence[str],
    *,
    limit: int | None,
    device: str,
    dtype: str,
    trust_remote_code: bool,
) -> Mapping[str, Mapping[str, float]]:
    """Returns the harness's numbers for the causal model in the folder `model`, by task and metric.

    The harness downloads the tasks' data sets, or reads them from its cache.

    Raises:
        UserError: the harness is not installed, or does not have a task.
    """
    check_installed(tasks)
    import lm_eval

    arguments = {
        "pretrained": str(model), "tokenizer": str(tokenizer), "dtype": dtype, "trust_remote_code": trust_remote_code
    }  # fmt: skip
    try:
        output = lm_eval.simple_evaluate(
            model="hf", model_args=arguments, tasks=list(tasks), limit=limit, device=device, log_samples=False
        )
    except (KeyError, ValueError) as error:
        raise UserError(f"--tasks {','.join(tasks)}: lm-eval refuses: {error}{suggest_suites(tasks)}") from error
    results = (output or {}).get("results", {})
    return {
        task: {name: value for name, value in numbers.items() if isinstance(value, int | float)}
        for task, numbers in results.items()
    }
