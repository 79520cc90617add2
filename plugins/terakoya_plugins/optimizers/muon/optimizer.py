"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/) for the matrices of the blocks, AdamW for the
rest."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from terakoya import hookimpl
from terakoya.components import Optimizer
from terakoya.toolkit.parameter_groups import Beta, decay_groups, trainable_parameters

if TYPE_CHECKING:
    import torch


class Muon(Optimizer):
    """torch's Muon for every matrix in the repeated blocks, torch's AdamW for embeddings, heads, norms and biases.

    With `adjust_lr_fn` "match_rms_adamw" (Liu et al., 2025, arXiv:2502.16982) updates have the size of AdamW's, and a
    `learning_rate` for AdamW suits both. With "original" Muon needs a higher one, such as 0.02, and
    `adamw_learning_rate` is that of the rest. The schedule multiplies both.

    Muon's updates are computed in bf16 where the device multiplies it fast, otherwise in float32. In bf16 losses differ
    more than with AdamW with another world size, which changes the last bits of gradients.
    """

    elementwise: ClassVar[bool] = False
    tensorwise: ClassVar[bool] = True
    supports_mup: ClassVar[bool] = True

    learning_rate: PositiveFloat = 1e-3
    """The peak learning rate of the matrices in the blocks, which is multiplied by the schedule's factor."""
    adamw_learning_rate: PositiveFloat | None = None
    """The peak learning rate of everything else, before the two factors; null is `learning_rate`."""
    embedding_factor: PositiveFloat = 1.0
    """The learning rate of embeddings, and of heads that share their weights, as a factor of everything else's."""
    norm_factor: PositiveFloat = 1.0
    """The learning rate of norms, biases and heads, as a factor of everything else's."""
    weight_decay: NonNegativeFloat = 0.1
    """The weight decay of matrices; biases and norms have none."""
    momentum: Beta = 0.95
    """The decay rate of Muon's momentum."""
    nesterov: bool = True
    """Whether the momentum is Nesterov's."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations that orthogonalise an update. Unit: iterations."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """How the size of updates depends on a matrix's shape: as in the "original", or so that they have the size of
    AdamW's ("match_rms_adamw")."""
    neuron_beta: Beta | None = None
    """The decay rate of each neuron's mean square in NorMuon; null is Muon without it."""
    cautious_weight_decay: bool = False
    """Whether a weight in the blocks decays only where its update makes it smaller, too."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and of the second moment."""
    eps: PositiveFloat = 1e-8
    """A small number that AdamW adds to the root of the second moment, against division by zero."""

    def build(self, module: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        import torch
        from transformers.pytorch_utils import Conv1D

        from terakoya_plugins.optimizers.muon.batched import CAUTIOUS, NEURON_BETA, TRANSPOSED, BatchedMuon
        from terakoya_plugins.optimizers.muon.muon_and_adamw import RATIO, WIDTH_POWERS, MuonAndAdamW, hidden_matrices

        hidden = {id(parameter) for parameter in hidden_matrices(module)}
        matrices = [parameter for parameter in trainable_parameters(module) if id(parameter) in hidden]
        rest = [parameter for parameter in trainable_parameters(module) if id(parameter) not in hidden]
        muon = adamw = None
        if matrices:
            transposed: set[int] = set()  # those of GPT-2, which are (inputs, outputs)
            if self.adjust_lr_fn == "original":  # else the size is the same
                transposed = {id(each.weight) for each in module.modules() if isinstance(each, Conv1D)}
            sides = [(side, [each for each in matrices if (id(each) in transposed) == side]) for side in (False, True)]
            muon = BatchedMuon(
                [{"params": params, TRANSPOSED: side} for side, params in sides if params],
                lr=self.learning_rate, weight_decay=self.weight_decay, momentum=self.momentum,
                nesterov=self.nesterov, ns_steps=self.ns_steps, adjust_lr_fn=self.adjust_lr_fn,
            )  # fmt: skip
            for group in muon.param_groups:
                group["width_power"] = WIDTH_POWERS[self.adjust_lr_fn]
                group[NEURON_BETA], group[CAUTIOUS] = self.neuron_beta, self.cautious_weight_decay
        if rest:
            embeddings = {id(each.weight) for each in module.modules() if isinstance(each, torch.nn.Embedding)}
            ratio = (self.adamw_learning_rate or self.learning_rate) / self.learning_rate
            by_factor: dict[float, list[torch.nn.Parameter]] = defaultdict(list)
            for each in rest:
                by_factor[self.embedding_factor if id(each) in embeddings else self.norm_factor].append(each)
            groups = [
                {**group, "elementwise": True, RATIO: ratio * factor}
                for factor, part in by_factor.items()
                for group in decay_groups(part, self.weight_decay)
            ]
            adamw = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps, fused=fused)
        return MuonAndAdamW(muon, adamw)


@hookimpl
def register_optimizers() -> dict[str, type[Optimizer]]:
    return {"muon": Muon}
