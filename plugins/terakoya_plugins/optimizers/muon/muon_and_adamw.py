"""Muon and AdamW over different weights as one torch optimizer, with one state and one list of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from terakoya.toolkit.parameter_groups import dimensions
from terakoya_plugins.optimizers.muon.batched import BatchedMuon

RATIO = "ratio"
WIDTH_POWERS = {"original": 0.0, "match_rms_adamw": 0.5}
"""By which power of the width learning rates of matrices go down with the key `mup`, by `adjust_lr_fn`: the largest
singular value of an update must stay as it is (Yang et al., 2023, arXiv:2310.17813), and is the learning rate times a
number that does not depend on the width, or times 0.2 of its root."""


class MuonAndAdamW(torch.optim.Optimizer):
    """Steps a Muon and an AdamW. Both use this optimizer's groups, Muon's first, and its state.

    `RATIO` of AdamW's groups is their learning rate divided by Muon's; all groups store Muon's. Where AdamW is fused,
    both read `found_inf` on the device: 1 where a step must change nothing.
    """

    found_inf: Tensor | None = None

    def __init__(self, muon: BatchedMuon | None, adamw: torch.optim.AdamW | None) -> None:
        self.parts: list[torch.optim.Optimizer] = [each for each in (muon, adamw) if each is not None]
        groups = [group for part in self.parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {"lr": groups[0]["lr"]})
        self.param_groups = groups
        self._step_supports_amp_scaling = adamw is None or bool(adamw.defaults["fused"])  # torch's name for it

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            is_adamw = isinstance(part, torch.optim.AdamW)
            # `load_state_dict` replaces state and groups, and ZeRO passes one group after another
            part.state = self.state
            part.param_groups = [each for each in self.param_groups if ("betas" in each) == is_adamw]
            rates = [group["lr"] for group in part.param_groups]
            if is_adamw:
                for group, rate in zip(part.param_groups, rates, strict=True):
                    group["lr"] = rate * group[RATIO]
            if self.found_inf is not None:
                part.found_inf = self.found_inf  # type: ignore[attr-defined]
            part.step()
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate
        return loss


def hidden_matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    """The matrices of the repeated blocks, without embeddings; every Transformers model has its blocks in a ModuleList.
    Without a ModuleList, all matrices except embeddings and those with an embedding's shape, such as heads."""
    embeddings = [each.weight for each in module.modules() if isinstance(each, nn.Embedding)]
    known, shapes = {id(each) for each in embeddings}, {each.shape for each in embeddings}
    blocks: list[nn.Module] = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    seen: set[int] = set()
    for part in blocks or [module]:
        for parameter in part.parameters():
            is_head = not blocks and parameter.shape in shapes
            if dimensions(parameter) == 2 and not is_head and id(parameter) not in known | seen:
                seen.add(id(parameter))
                yield parameter
