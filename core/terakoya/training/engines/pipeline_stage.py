"""Stages of a pipeline: each is a run of a model's neighbouring blocks, with what stands before the first or behind the
last.

A stage is a copy of the whole root module of which the architecture has taken out what lies elsewhere
(`Architecture.keep_stage_blocks`), so that a model's own forward runs it, masks and positions included. Every stage has
the micro-batch itself; hidden states alone travel.

Letters: B rows of a micro-batch, T positions, H hidden size; R rows of hidden states that travel, the same for all
micro-batches of a step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terakoya.components import Architecture
from terakoya.components.vocabulary import Vocabulary
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.toolkit.random_keys import hash_u64
from terakoya.training.distributed.topology import split_evenly
from terakoya.training.engines.engine import AUTOCAST_DTYPES, LossFn
from terakoya.training.model.module_parts import architecture_of, top_level_models

KEY = "parallel.pp_size"


@dataclass
class MicroBatch:
    """One micro-batch of a step, until the schedule has run it through all stages.

    Attributes:
        tensors: the batch, arrays (B, T) and what else there is.
        loss_fn: from its sums to the scalar whose gradient is wanted.
        seed: what dropout was seeded with when it came.
        sums: what the last stage made of it, detached; empty elsewhere.
    """

    tensors: Mapping[str, Tensor]
    loss_fn: LossFn
    seed: int
    sums: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """Its rows B and positions T."""
        rows, length = self.tensors["input_ids"].shape
        return rows, length


class Stage(nn.Module):
    """The blocks number `index` of `count` equal shares.

    Attributes:
        root: the objective's module over what is left of its model.
        step: the micro-batches of the step that is run; None is one that holds nothing, where the schedule needs more
            than there are.
        rows: R, the rows of hidden states that travel.
        scale: what the loss is multiplied by, () float32; None is 1.
    """

    def __init__(
        self,
        root: nn.Module,
        architecture: Architecture,
        *,
        index: int,
        count: int,
        device: torch.device,
        precision: str,
    ) -> None:
        super().__init__()
        (model,) = top_level_models(root)
        blocks = len(architecture.blocks(model))
        if blocks < count:  # conflicts.py has told all whose depth is a setting
            raise UserError(f"{KEY}: expected at most {blocks} stages, as many as {type(model).__name__} has blocks")
        architecture.keep_stage_blocks(model, range(*split_evenly(blocks, count, index)))
        self.root = root
        self.hidden = partial(architecture.hidden, model)  # no attribute of its own: the model is the root's
        self.index = index
        self.first, self.last = index == 0, index == count - 1
        self.device = device
        self.autocast_dtype = AUTOCAST_DTYPES.get(precision)
        self.hidden_size: int = model.config.hidden_size
        self.step: list[MicroBatch | None] = []
        self.rows = 0
        self.length = 0
        self.scale: Tensor | None = None

    def forward(self, *received: Tensor, micro: Tensor) -> Tensor:
        """What a schedule calls: hidden states (R, T, H) float32 of the micro-batch number `micro` (1,), or from the
        last stage its share of the loss, (); `received` is what the stage before returned, nothing for the first."""
        work = self.step[int(micro)]
        hidden = received[0] if received else None
        if work is None:
            return self._nothing(hidden)
        self._seed(work.seed)
        rows, _ = work.shape
        # a slice's gradient would be a copy
        made = self.run(work.tensors, hidden if hidden is None or rows == self.rows else hidden[:rows])
        if isinstance(made, Tensor):
            missing = self.rows - rows
            return F.pad(made, (0, 0, 0, 0, 0, missing)) if missing else made  # padding with nothing copies
        work.sums = {name: value.detach() for name, value in made.items()}
        loss = work.loss_fn(made)
        return loss if self.scale is None else loss * self.scale

    def run(self, tensors: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor | Mapping[str, Tensor]:
        """Hidden states (B, T, H) float32 of the batch `tensors`, or from the last stage the objective's sums; `hidden`
        (B, T, H) is what the stage before made, None for the first."""
        given = tensors if hidden is None else {**tensors, "inputs_embeds": hidden}
        with torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            if self.last:
                sums: Mapping[str, Tensor] = self.root(given)
                return sums
            return self.hidden(given).float()

    def _nothing(self, hidden: Tensor | None) -> Tensor:
        """What travels for a micro-batch that holds nothing; no weight has a part in it."""
        if hidden is None:
            shape = (self.rows, self.length, self.hidden_size)
            return torch.zeros(shape, device=self.device, requires_grad=True)
        return hidden.sum() * 0.0 if self.last else hidden.clone()

    def _seed(self, seed: int) -> None:
        """Seeds dropout of a micro-batch, each stage for itself: in which order a schedule runs them is no matter."""
        dropout_generator(self.device).manual_seed(int(hash_u64(seed, "stage", self.index)) & 0x7FFF_FFFF_FFFF_FFFF)


def dropout_generator(device: torch.device) -> torch.Generator:
    """The generator that dropout on `device` draws from."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def build_stage(
    module: nn.Module,
    parameters: Parameters,
    vocabulary: Vocabulary,
    *,
    index: int,
    count: int,
    device: torch.device,
) -> Stage:
    """Stage `index` of `count` of the root `module`, whose weights it shares.

    Raises:
        UserError: there are fewer blocks than stages.
    """
    shared = {id(each): each for each in [*module.parameters(), *module.buffers()]}
    root = copy.deepcopy(module, shared)
    (model,) = top_level_models(root)
    architecture = architecture_of(parameters, model, vocabulary, key=KEY)
    return Stage(root, architecture, index=index, count=count, device=device, precision=parameters.precision)
