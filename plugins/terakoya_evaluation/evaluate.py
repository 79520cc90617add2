"""Evaluates a finished model or a run: chooses the program that measures what was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from terakoya.errors import UserError
from terakoya.places import as_fields
from terakoya.plugins.families import function_of_family
from terakoya_evaluation.options import EvaluateOptions
from terakoya_evaluation.result import Evaluation

if TYPE_CHECKING:
    import torch

Options = TypeVar("Options", bound=EvaluateOptions)


@dataclass(frozen=True)
class Program(Generic[Options]):
    """A way to measure a model.

    Attributes:
        is_asked: whether the options ask for it.
        measure: (options, device) -> what was found. Raises UserError where an option does not fit.
    """

    is_asked: Callable[[Options], bool]
    measure: Callable[[Options, torch.device], Evaluation]


def evaluate(source: Path | str, **options: Any) -> Evaluation:
    """Evaluates the model in `source`: a Transformers folder, a checkpoint, a run (its newest whole checkpoint), or
    RUN@STEP. `options` are the other fields of `EvaluateOptions`, or with `tasks` those of the family quality's
    `TaskOptions`. Raises UserError if the arguments, the model or the data do not fit together."""
    if "tasks" in options or "tuning" in options:
        found: Evaluation = function_of_family("evaluate_tasks")(source, **options)
        return found
    return evaluate_model(EvaluateOptions(**as_fields(EvaluateOptions, {"source": source, **options})))


def evaluate_model(options: EvaluateOptions) -> Evaluation:
    """Measures what `options` ask, as `evaluate`."""
    from terakoya_evaluation.objective import measure_objective
    from terakoya_evaluation.perplexity import measure_texts

    programs = [
        Program(_asks_for_objective, measure_objective),
        Program(lambda options: options.has_texts, measure_texts),
    ]
    return run_program(programs, options)


def run_program(programs: Sequence[Program[Options]], options: Options) -> Evaluation:
    """Returns what the first of `programs` that `options` ask for finds. Raises UserError if they ask for none."""
    from terakoya.inference.loading import find_device
    from terakoya.inference.padded_attention import use_safe_attention

    use_safe_attention()  # also for the models of checkpoints and of lm-eval, which no loader here loads
    device = find_device(options.device, precision=options.model_precision)
    if device.type == "mps":
        raise UserError(
            f"--device {options.device}: losses are added up in float64, which Apple's GPU (MPS) does not have; "
            "use --device cpu"
        )
    for program in programs:
        if program.is_asked(options):
            return program.measure(options, device)
    options.checkpoint()
    raise UserError("nothing to evaluate on: name --data STORE, --corpus FILE or --tasks NAME")


def _asks_for_objective(options: EvaluateOptions) -> bool:
    is_run = options.checkpoint() is not None
    on_stores = not (options.corpora or options.corpus)
    return options.measure == "objective" or (options.measure == "auto" and is_run and on_stores)
