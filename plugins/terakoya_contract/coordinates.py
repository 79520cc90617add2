"""The coordinate check of an architecture that supports the key `mup` (Yang et al., 2022, Tensor Programs V,
arXiv:2203.03466, appendix D.1): after some steps, activations have changed as much in a wide model as in a narrow one.

Letters in shapes: B rows, T positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from terakoya.components import Architecture, Head
from terakoya.toolkit.architectures import attention
from terakoya.training.model import mup
from terakoya.training.model.module_parts import norm_before_tied_head
from terakoya_contract.architecture import ArchitectureCase
from terakoya_contract.results import CheckFailed, CheckSkipped
from terakoya_contract.toy import VOCABULARY

BASE, MULTIPLES = 2, (2, 4)
"""The base width as a multiple of toy widths, and the other widths as multiples of it."""
STEPS, ROWS = 4, 4
LEARNING_RATE = 2e-3
LIMIT = 1.5
"""How many times as large as at the base width, or in blocks as small, a change may be. In the bundled families it is
at most 1.3 at four times that width; without the scales of `mup` some change is at least 2.7 there, in most above 4."""

LOGITS = "logits"
Changes = list[tuple[str, list[float]]]
"""What is computed, in order -> the mean absolute change of its values after each step."""


def check_coordinates(case: ArchitectureCase) -> None:
    """With mup, training changes activations as much in a wide model as in a narrow one."""
    widths = case.architecture.mup_widths
    if not widths:
        raise CheckSkipped("it names no mup_widths: the key mup is refused")
    if "hidden_size" not in widths or set(widths) - set(type(case.architecture).model_fields):
        raise CheckFailed(f"mup_widths is {tuple(widths)}; expected names of its fields, hidden_size among them")
    base = case.architecture.scale_width(Fraction(BASE), widths)
    for head in sorted(case.architecture.heads - {"body"}):
        narrow = _train(case, base, 1, head)
        for multiple in MULTIPLES:
            wide = base.scale_width(Fraction(multiple), widths)
            problem = _find_growth(narrow, _train(case, wide, multiple, head))
            if problem:
                sizes = [each.hidden_size for each in (wide, base)]  # type: ignore[attr-defined] # checked above
                raise CheckFailed(
                    f"for {head}, {problem} at hidden_size {sizes[0]} as at the base width, {sizes[1]}: is each of its "
                    "widths in mup_widths, and does it multiply embeddings, logits or norms by a number of its own?"
                )


def _find_growth(narrow: Changes, wide: Changes) -> str | None:
    """Returns what changes by another amount in the `wide` model, as the beginning of a sentence; None for nothing."""
    for (name, before), (_, after) in zip(narrow, wide, strict=True):
        for step, (small, large) in enumerate(zip(before, after, strict=True), 1):
            ratio = large / small
            if not ratio <= LIMIT or (ratio < 1 / LIMIT and name != LOGITS):
                return f"after {step} steps the {name} have changed {ratio:.2g} times as much"
    return None


def _train(case: ArchitectureCase, architecture: Architecture, multiple: int, head: Head) -> Changes:
    """Takes some steps of Adam on one batch, with the scales of `multiple` times the base width; returns how much the
    outputs of blocks and of the model change."""
    torch.manual_seed(3)
    model = architecture.build(VOCABULARY, head)
    attention.use(model, "sdpa")
    model.eval()
    with torch.device("meta"):
        wider = mup.widen(architecture).build(VOCABULARY, head)
    norm = norm_before_tied_head(model, architecture.blocks(model))
    scales = mup.compare(model, wider, multiple, [] if norm is None else [norm])
    mup.scale_initial_values(model, scales)
    optimizer = torch.optim.Adam(
        [
            {"params": [value], "lr": LEARNING_RATE * scales[name].rate}
            for name, value in model.named_parameters()
            if value.requires_grad
        ]
    )
    length = case.length()
    batch = {name: value.repeat(ROWS, 1) for name, value in case.row(length // 2, length - length // 2).items()}
    generator = torch.Generator().manual_seed(7)
    low, shape = len(VOCABULARY.special), batch["input_ids"].shape
    batch["input_ids"], targets = (torch.randint(low, VOCABULARY.size, shape, generator=generator) for _ in range(2))
    outputs = [_step(architecture, model, head, batch, targets, optimizer) for _ in range(STEPS + 1)]
    return [
        (name, [float((after[name] - value).abs().mean()) for after in outputs[1:]])
        for name, value in outputs[0].items()
    ]


def _step(
    architecture: Architecture,
    model: Any,
    head: Head,
    batch: Mapping[str, Tensor],
    targets: Tensor,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Tensor]:
    """Updates `model`; returns the outputs of blocks, and the logits, before."""
    outputs: dict[str, Tensor] = {}
    number = itertools.count(1)

    def keep(block: nn.Module, given: Any, returned: Any) -> None:
        value = returned if isinstance(returned, Tensor) else returned[0]
        outputs[f"outputs of block {next(number)}"] = value.detach()

    hooks = [block.register_forward_hook(keep) for block in architecture.blocks(model)]
    hidden = architecture.hidden(model, batch)
    for hook in hooks:
        hook.remove()
    if head == "discriminator":
        logits = architecture.replaced_logits(model, hidden)
        loss = F.binary_cross_entropy_with_logits(logits, (targets % 2).float())
    else:
        logits = architecture.logits(model, hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    outputs[LOGITS] = logits.detach()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return outputs
