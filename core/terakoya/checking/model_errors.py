"""Checks the model of a run before it is built, and explains errors of its first steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import psutil

from terakoya.checking.model_check import check_memory, check_model
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.distributed.context import DistributedContext
from terakoya.distributed.rank_watch import find_communication_error
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.training.model.determinism import explain_refusals


@contextmanager
def explain_model_errors(parameters: Parameters, vocabulary: Vocabulary, context: DistributedContext) -> Iterator[None]:
    """Checks the model in rank 0 first. While open, explains an error of the model in its first steps, as `check_model`
    does, and lets a plugin explain that memory ran out (`hookspecs.register_watches`)."""

    def check() -> None:
        check_model(parameters, vocabulary, small_too=False)
        check_memory(parameters, vocabulary, total=psutil.virtual_memory().total + psutil.swap_memory().total)

    if context.world_size > 1:
        context.run_on_main("checking the model", check)
    else:
        check()
    watch = registry().watches.get("memory")
    try:
        with watch[0](parameters, vocabulary, context) if watch else nullcontext(), explain_refusals():
            yield
    except (OSError, UserError):
        raise
    except Exception as error:
        if find_communication_error(error) is None:
            check_model(parameters, vocabulary)
        raise
