"""Checks of an objective: batches depend on rows and keys alone, and losses are sums.

Letters in shapes: B rows, T positions.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from terakoya.components import Architecture, Batch, Objective
from terakoya.components.rows import Layout, Rows
from terakoya.errors import UserError
from terakoya.plugins import registry
from terakoya.toolkit.architectures import attention
from terakoya.toolkit.objectives.compared_examples import EMBED, EMBEDDINGS, REAL
from terakoya_contract import settings, toy
from terakoya_contract.results import Check, CheckFailed, CheckSkipped

TOLERANCE = 1e-4


class ObjectiveCase(settings.Case):
    """An objective, toy rows for it, and its module over an architecture that it accepts."""

    @cached_property
    def objective(self) -> Objective:
        return self.settings_of(Objective)

    @cached_property
    def layout(self) -> Layout:
        return self.objective.row_layout()

    @cached_property
    def rows(self) -> Rows:
        """Six toy rows in the objective's layout."""
        with tempfile.TemporaryDirectory() as folder:
            return toy.make_rows(toy.make_store_for(self.layout, Path(folder) / "toy"), self.layout)

    def collate(self, rows: Rows) -> Batch:
        """The batch of `rows`. Raises CheckFailed for another type."""
        batch = self.objective.collate(rows, toy.VOCABULARY)
        if not isinstance(batch, Batch):
            raise CheckFailed(f"collate returned {type(batch).__name__}, expected terakoya.components.Batch")
        return batch

    @cached_property
    def architecture(self) -> Architecture:
        """The first registered architecture that the objective accepts, at toy size."""
        reasons = []
        for name in registry().names("architectures"):
            architecture = toy.settings(registry().component("architectures", name))
            assert isinstance(architecture, Architecture)
            try:
                self.objective.build(architecture, toy.VOCABULARY)
            except UserError as error:
                reasons.append(str(error))
            else:
                return architecture
        raise CheckFailed("it accepts no installed architecture: " + "; ".join(reasons))

    @cached_property
    def module(self) -> nn.Module:
        """The root module in eval mode."""
        torch.manual_seed(3)
        module = self.objective.build(self.architecture, toy.VOCABULARY)
        if not isinstance(module, nn.Module):
            raise CheckFailed(f"build returned {type(module).__name__}, expected a torch.nn.Module")
        attention.use(module, "sdpa")
        return module.eval()

    def forward(self, rows: Rows) -> Mapping[str, Tensor]:
        """The module's output for `rows`. Raises CheckFailed for anything but a mapping of tensors."""
        tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in self.collate(rows).arrays.items()}
        sums = self.module(tensors)
        if not isinstance(sums, Mapping) or not all(isinstance(each, Tensor) for each in sums.values()):
            raise CheckFailed(f"the module's forward returned {_describe(sums)}, expected a mapping of name to tensor")
        return sums

    def embed(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The embeddings of the examples of `rows`, and which slots are examples."""
        tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in self.collate(rows).arrays.items()}
        output = self.module({**tensors, EMBED: torch.ones((), dtype=torch.bool)})
        if set(output) != {EMBEDDINGS, REAL}:
            raise CheckFailed("forward must end in terakoya.toolkit.objectives.compared_examples.forward_examples")
        return output[EMBEDDINGS], output[REAL]


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return str({name: type(each).__name__ for name, each in value.items()})
    return type(value).__name__


def select_rows(rows: Rows, where: slice) -> Rows:
    """The rows of `rows` in the slice `where`."""
    parts: dict[str, Any] = {name: value[where] for name, value in vars(rows).items() if isinstance(value, np.ndarray)}
    return replace(rows, **parts)


def check_layout(case: ObjectiveCase) -> None:
    """It returns a row layout."""
    if not isinstance(case.layout, Layout):
        raise CheckFailed(f"row_layout returned {type(case.layout).__name__}, expected terakoya.components.rows.Layout")


def check_terms(case: ObjectiveCase) -> None:
    """It has at least one loss with a weight."""
    terms = case.objective.terms()
    if not any(term.weight is not None for term in terms.values()):
        raise CheckFailed(
            f"no term has a weight: {sorted(terms) or 'there are none'}; give at least one a weight: "
            '{"my_loss": LossTerm("masked", 1.0)}'
        )


def check_batch(case: ObjectiveCase) -> None:
    """A batch has the arrays of its rows, and the count that each term is divided by."""
    batch = case.collate(case.rows)
    shape = case.rows.tokens.shape
    for name in ("input_ids", "document_ids", "position_ids"):
        array = batch.arrays.get(name)
        if array is None:
            raise CheckFailed(f"the batch has no {name}; copy it from the rows")
        if array.shape != shape or array.dtype != np.int64:
            raise CheckFailed(f"{name} is {array.shape} {array.dtype}, expected {shape} int64")
    needed = {"tokens", *(term.count for term in case.objective.terms().values())}
    missing = sorted(needed - set(batch.counts))
    if missing:
        raise CheckFailed(f"the batch does not count {', '.join(missing)}; it counts {', '.join(sorted(batch.counts))}")
    real = int(np.count_nonzero(case.rows.document_ids >= 0))
    if batch.counts["tokens"] != real:
        raise CheckFailed(f"it counts {batch.counts['tokens']} tokens, but the rows have {real} without padding")


def check_purity(case: ObjectiveCase) -> None:
    """A row's batch depends on the row, its key and the run's progress alone, not on a random generator or on other
    rows."""
    for progress in (0.0, 0.5, 1.0):
        _check_purity(case, replace(case.rows, progress=progress))


def _check_purity(case: ObjectiveCase, rows: Rows) -> None:
    one, other = case.collate(rows), case.collate(rows)
    for name, array in one.arrays.items():
        if not np.array_equal(array, other.arrays[name]):
            raise CheckFailed(
                f"two batches of the same rows differ in {name}; draw random numbers with "
                "terakoya.toolkit.random_keys.draws(rows.keys, ...), not from a generator"
            )
    parts = [case.collate(select_rows(rows, slice(index, index + 1))) for index in range(len(rows))]
    inputs = np.concatenate([part.arrays["input_ids"] for part in parts])
    if not np.array_equal(inputs, one.arrays["input_ids"]):
        raise CheckFailed(
            "a row's input_ids depend on which other rows are in the batch; draw by the row's key and position"
        )
    for name, count in one.counts.items():
        total = sum(part.counts[name] for part in parts)
        if total != count:
            raise CheckFailed(f"the count {name} of a batch is {count}, but {total} over its rows one by one")


def check_losses(case: ObjectiveCase) -> None:
    """The module returns every one of its terms as a float32 sum, and nothing else."""
    terms = case.objective.terms()
    sums = case.forward(case.rows)
    missing = sorted(set(terms) - set(sums))
    if missing:
        raise CheckFailed(f"forward did not return {', '.join(missing)}, only {', '.join(sorted(sums)) or 'nothing'}")
    if set(sums) - set(terms):
        raise CheckFailed(f"forward returned {', '.join(sorted(set(sums) - set(terms)))}, which terms() does not name")
    for name, value in sums.items():
        bins = terms[name].bins
        if value.dtype != torch.float32 or tuple(value.shape) != (() if bins is None else (bins,)):
            raise CheckFailed(
                f"{name} is {tuple(value.shape)} {value.dtype}, expected a float32 "
                f"{'scalar' if bins is None else f'vector of {bins}'}; return the sum, not the mean"
            )
        if not bool(torch.isfinite(value).all()):
            raise CheckFailed(f"{name} is {value.tolist()}, which is not finite")


def check_sums(case: ObjectiveCase) -> None:
    """Its losses are sums: those of two halves of a batch add up to that of the whole."""
    if case.objective.compares_examples:
        raise CheckSkipped("its losses compare the examples of a whole step")
    half = len(case.rows) // 2
    with torch.no_grad():
        whole, first, second = (
            case.forward(select_rows(case.rows, where)) for where in (slice(None), slice(half), slice(half, None))
        )
    for name, term in case.objective.terms().items():
        if term.weight is None:
            continue
        got, expected = (first[name] + second[name]).item(), whole[name].item()
        if abs(got - expected) > TOLERANCE * max(1.0, abs(expected)):
            raise CheckFailed(
                f"{name} of a batch is {expected:.6g}, of its two halves together {got:.6g}; return the sum over what "
                "the term counts: the training loop divides it by the count over all processes"
            )


def check_compared_examples(case: ObjectiveCase) -> None:
    """Examples that are compared have the values of their step, however it is divided; empty slots change none."""
    if not case.objective.compares_examples:
        raise CheckSkipped("its losses do not compare examples")
    with torch.no_grad():
        whole, *halves = (
            case.embed(select_rows(case.rows, where)) for where in (slice(None), slice(0, 3), slice(3, None))
        )
        embeddings, real = (torch.cat([half[part] for half in halves]) for part in (0, 1))
        values = [case.objective.compare(*pair) for pair in (whole, (embeddings, real))]
        values.append(case.objective.compare(embeddings[real], real[real]))
    if list(values[0]) != list(case.objective.terms()):
        raise CheckFailed(f"compare returned {list(values[0])}, expected the terms {list(case.objective.terms())}")
    for name in values[0]:
        totals = [each[name].sum().item() for each in values]
        if max(totals) - min(totals) > TOLERANCE * max(1.0, abs(totals[0])):
            raise CheckFailed(
                f"{name} is {totals[0]:.6g} where one batch has all examples, {totals[1]:.6g} where two have them, and "
                f"{totals[2]:.6g} without empty slots; the embedding of an example must not depend on its batch, and "
                "compare must give empty slots the value 0 and take no notice of them"
            )


def check_gradients(case: ObjectiveCase) -> None:
    """Gradients of its losses reach the model in training mode."""
    module = case.module
    module.train()
    try:
        sums = case.forward(case.rows)
    finally:
        module.eval()
    weights = {name: term.weight for name, term in case.objective.terms().items() if term.weight is not None}
    missing = sorted(set(weights) - set(sums))
    if missing:
        raise CheckFailed(f"in training mode forward does not return {', '.join(missing)}")
    torch.stack([weight * sums[name] for name, weight in weights.items()]).sum().backward()
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    module.zero_grad()
    if not gradients:
        raise CheckFailed("no gradient reaches any weight")
    if not all(bool(torch.isfinite(each).all()) for each in gradients):
        raise CheckFailed("a gradient is not finite")


def check_exports(case: ObjectiveCase) -> None:
    """exports returns Transformers models, by sub-folder."""
    from transformers import PreTrainedModel

    models = case.objective.exports(case.module)
    if not isinstance(models, Mapping) or not models:
        raise CheckFailed(f'exports returned {models!r}, expected a mapping such as {{"": module.model}}')
    wrong = [name for name, model in models.items() if not isinstance(model, PreTrainedModel)]
    if wrong:
        raise CheckFailed(
            f"{wrong[0]!r} is a {type(models[wrong[0]]).__name__}, expected a transformers.PreTrainedModel"
        )


def check_start_from_export(case: ObjectiveCase) -> None:
    """A run can start from the models that it exports."""
    modules = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        module = case.objective.build(case.architecture, toy.VOCABULARY)
        for weight in module.parameters():  # as training does: every weight changes
            weight.data.add_(torch.randn_like(weight), alpha=0.02)
        modules.append(module)
    trained, fresh = modules
    models = {name: copy.deepcopy(model) for name, model in case.objective.exports(trained).items()}
    expected = {
        name: {key: value.clone() for key, value in model.state_dict().items()} for name, model in models.items()
    }
    try:
        case.objective.load_models(fresh, models)
    except UserError as error:
        raise CheckFailed(f"load_models refuses the models that exports returned: {error}") from error
    for name, model in case.objective.exports(fresh).items():
        got = model.state_dict()
        changed = [key for key, value in expected[name].items() if not torch.allclose(got[key], value, atol=1e-6)]
        if changed:
            raise CheckFailed(
                f"of {name or 'the model'}, {changed[0]} differs after exports and load_models; write load_models so "
                "that it is the inverse of exports"
            )


def check_padding_rows(case: ObjectiveCase) -> None:
    """A row of padding alone has no counts and finite losses."""
    rows = select_rows(case.rows, slice(0, 1))
    empty = Rows(
        tokens=np.full_like(rows.tokens, toy.VOCABULARY.pad),
        document_ids=np.full_like(rows.document_ids, -1),
        position_ids=np.zeros_like(rows.position_ids),
        word_starts=None if rows.word_starts is None else np.zeros_like(rows.word_starts),
        keys=rows.keys,
        token_type_ids=None if rows.token_type_ids is None else np.zeros_like(rows.token_type_ids),
        next_sentence=None if rows.next_sentence is None else np.full_like(rows.next_sentence, -100),
        labels=None if rows.labels is None else np.full_like(rows.labels, -100),
    )
    if rows.next_sentence is not None:
        raise CheckSkipped("rows of pairs are never empty")
    if case.collate(empty).counts["tokens"]:
        raise CheckFailed("it counts tokens in a row of padding; count where rows.document_ids >= 0")
    with torch.no_grad():
        sums = case.forward(empty)
    broken = [name for name, value in sums.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise CheckFailed(f"{broken[0]} of a row of padding is {sums[broken[0]].tolist()}; a sum over nothing is 0")


CHECKS: tuple[Check, ...] = (
    check_layout, check_terms, check_batch, check_purity, check_losses, check_sums, check_compared_examples,
    check_padding_rows,
    check_gradients, check_exports, check_start_from_export,
)  # fmt: skip
