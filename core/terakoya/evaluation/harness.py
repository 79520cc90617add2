"""Tasks of the Language Model Evaluation Harness (`lm-eval`), where it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from terakoya.errors import UserError


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
    """The harness's numbers for the causal model in the folder `model`, by task and metric.

    Its data sets are the harness's own affair: it downloads them, or finds them in its cache.

    Raises:
        UserError: the harness is not installed, or knows no such task.
    """
    try:
        import lm_eval
    except ImportError:
        raise UserError(
            '--tasks: lm-eval is not installed; expected the extra "evaluate": pip install "terakoya[evaluate]"'
        ) from None
    arguments = {
        "pretrained": str(model), "tokenizer": str(tokenizer), "dtype": dtype, "trust_remote_code": trust_remote_code
    }  # fmt: skip
    try:
        found = lm_eval.simple_evaluate(
            model="hf", model_args=arguments, tasks=list(tasks), limit=limit, device=device, log_samples=False
        )
    except (KeyError, ValueError) as error:
        raise UserError(f"--tasks {','.join(tasks)}: lm-eval refuses: {error}") from error
    results = (found or {}).get("results", {})
    return {
        task: {name: value for name, value in numbers.items() if isinstance(value, int | float)}
        for task, numbers in results.items()
    }
