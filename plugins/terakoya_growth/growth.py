"""A larger model from the weights of a smaller one: more blocks, wider layers, or both.

See docs/design/growth.md. Letters: H hidden size, V vocabulary size, T positions.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from terakoya.components import Architecture
from terakoya.components.copy_weights import join_names
from terakoya.config.start_from import Growth
from terakoya.errors import UserError
from terakoya.toolkit.random_keys import hash_u64
from terakoya.training.model.module_parts import input_axis, norm_before_tied_head

KEPT = 1e-4
"""The largest difference of logits, relative to the largest logit, that rounding explains."""
PROBE_LENGTH = 16


def grow(
    source: PreTrainedModel, target: PreTrainedModel, ways: Collection[Growth], architecture: Architecture, *, seed: int
) -> tuple[PreTrainedModel, str]:
    """Returns a model in the sizes of `target` with the weights of `source`, and a sentence about it. Draws from no
    generator of torch's.

    Args:
        ways: "stack" or "identity" for more blocks, "tile" for wider layers.
        architecture: that of `target`; it names the blocks and, for "identity", the `output_layers`.
        seed: of the unequal shares that copies of an input have.

    Raises:
        UserError: `target` is not larger in these ways, or "identity" is not to be had with this family.
    """
    _check_sizes(source.config, target.config, ways)
    depths = tuple({parent: len(blocks) for parent, blocks in _lists(each, architecture)} for each in (source, target))
    if depths[0].keys() != depths[1].keys():
        raise UserError("its blocks have other names than those of the architecture")
    fewer = [parent for parent, count in depths[1].items() if count < depths[0][parent]]
    deeper = depths[0] != depths[1]
    if fewer:
        raise UserError(
            f"it has {depths[0][fewer[0]]} blocks, the architecture {depths[1][fewer[0]]}; growing adds blocks"
        )
    if deeper and not set(ways) - {"tile"}:
        raise UserError('it has fewer blocks than the architecture; add "stack" or "identity" to start_from.grow')
    if "identity" in ways and not architecture.output_layers:
        raise UserError(
            "its family names no output_layers: where norms come after the sums, as BERT's do, no block can be without "
            'effect; use "stack" in place of "identity"'
        )
    larger = _Larger(source, depths[0], architecture.fused_layers, seed)
    grown = copy.deepcopy(target)
    grown.set_attn_implementation("eager")
    problems, wider = [], False
    with torch.no_grad():
        for name, value in grown.named_parameters():
            try:
                old = larger.find(name)
                wider |= old.shape != value.shape
                value.copy_(larger.make_wider(name, old, value.shape, grown.get_submodule(name.rpartition(".")[0])))
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise UserError(join_names(problems, 3))
        if not deeper and not wider:
            raise UserError("it is as large as the architecture; leave out start_from.grow")
        if "identity" in ways:
            _silence_new_blocks(grown, depths[0], architecture)
        if wider:
            _weaken_tied_head(grown, source, architecture)
    change = _difference(source, grown)
    sizes = [f"{depths[0][each]} to {count} blocks" for each, count in depths[1].items()] if deeper else []
    if wider:
        sizes.append(f"hidden size {_hidden_size(source.config)} to {_hidden_size(target.config)}")
    if change <= KEPT:
        return grown, f"grown from {', '.join(sizes)}; its logits are as before ({change:.0e})"
    return grown, f"grown from {', '.join(sizes)}; its logits change by up to {change:.0%} of the largest"


@dataclass(frozen=True)
class _Larger:
    """The weights of a model, looked up and enlarged for a larger one.

    Attributes:
        source: the smaller model.
        depths: the name of each list of blocks -> the blocks that `source` has.
        fused: the last part of a layer's name -> the number of matrices side by side in its outputs.
        seed: of the shares of copied inputs.
    """

    source: PreTrainedModel
    depths: Mapping[str, int]
    fused: Mapping[str, int]
    seed: int

    def find(self, name: str) -> Tensor:
        """Returns the weight of `source` for `name` of the larger model: of block i that of block i modulo the number
        of blocks, or of the nearest block that has it.

        Raises:
            UserError: there is none.
        """
        weights: dict[str, Tensor] = self.source.state_dict(keep_vars=True)
        names = [name]
        for parent, count in self.depths.items():
            found = re.fullmatch(rf"{re.escape(parent)}\.(\d+)\.(.+)", name)
            if found:
                block = int(found[1]) % count
                names = [f"{parent}.{each}.{found[2]}" for each in sorted(range(count), key=lambda n: abs(n - block))]
        for each in names:
            if each in weights:
                return weights[each]
        raise UserError(f"it has no weight for {name}")

    def make_wider(self, name: str, old: Tensor, shape: Sequence[int], owner: nn.Module) -> Tensor:
        """Returns `old` repeated to `shape`. Repeated outputs are copies; the copies of an input share its weight.

        Where all sizes are multiples, what the layer computes is repeated, too. Shares are unequal (0.5 to 1.5 of an
        equal one before they are made to sum up to 1), so that the copies learn different things.

        Raises:
            UserError: a dimension shrinks, or is none that is an input or an output of a known kind of layer.
        """
        if tuple(old.shape) == tuple(shape):
            return old
        axis = input_axis(owner, old)
        inputs, outputs = (-1, old.ndim - 1) if axis is None else (axis, 1 - axis)
        odd = [dim for dim in range(old.ndim) if dim not in (inputs, outputs) and old.shape[dim] != shape[dim]]
        parts = self.fused.get(name.split(".")[-2], 1)
        sizes = old.shape[outputs], shape[outputs]
        shrinks = any(there > here for there, here in zip(old.shape, shape, strict=True))
        if odd or shrinks or old.ndim > 2 or (sizes[0] != sizes[1] and any(each % parts for each in sizes)):
            raise UserError(f"{name} is {tuple(old.shape)} and cannot become {tuple(shape)}")
        if sizes[0] != sizes[1]:
            within = torch.arange(sizes[1] // parts) % (sizes[0] // parts)
            places = torch.cat([part * (sizes[0] // parts) + within for part in range(parts)])
            old = old.index_select(outputs, places)
        if inputs >= 0 and old.shape[inputs] != shape[inputs]:
            old = self._share(name, old, inputs, shape[inputs])
        return old

    def _share(self, name: str, old: Tensor, dim: int, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash_u64(self.seed, "growth", name) >> 1)
        places = torch.arange(size) % old.shape[dim]
        copied = old.index_select(dim, places)
        shares = torch.rand(copied.shape, generator=generator) + 0.5
        totals = torch.zeros_like(old).index_add(dim, places, shares)
        return copied * shares / totals.index_select(dim, places)


def _check_sizes(source: PretrainedConfig, target: PretrainedConfig, ways: Collection[Growth]) -> None:
    """Raises UserError where the heads of two models have different sizes."""
    here, there = (
        getattr(each, "head_dim", None) or each.hidden_size // each.num_attention_heads for each in (source, target)
    )
    if "tile" in ways and here != there:
        raise UserError(
            f"its attention heads have {here} dimensions, those of the architecture {there}; growing adds heads, and "
            f"{target.hidden_size // here or 1} have these dimensions"
        )


def _lists(model: PreTrainedModel, architecture: Architecture) -> list[tuple[str, list[str]]]:
    """The names of the blocks of `model`, by that of the list they are in."""
    names = {id(module): name for name, module in model.named_modules()}
    lists: dict[str, list[str]] = {}
    for block in architecture.blocks(model):
        name = names[id(block)]
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    return list(lists.items())


def _silence_new_blocks(grown: PreTrainedModel, depths: Mapping[str, int], architecture: Architecture) -> None:
    """Sets the weights of the output layers of all blocks that `grown` has beyond `depths` to 0."""
    for parent, blocks in _lists(grown, architecture):
        for block in blocks[depths[parent] :]:
            for name, module in grown.get_submodule(block).named_modules():
                if name.split(".")[-1] in architecture.output_layers:
                    for value in module.parameters():
                        value.zero_()


def _weaken_tied_head(grown: PreTrainedModel, source: PreTrainedModel, architecture: Architecture) -> None:
    """Scales the norm before a head that is tied to the embeddings, where these have become wider: a sum over copies
    counts each of them. ELECTRA's may be as wide as before in a wider model."""
    norm = norm_before_tied_head(grown, architecture.blocks(grown))
    if norm is not None:
        for value in norm.parameters():
            value.mul_(_embedding_size(source) / _embedding_size(grown))


def _embedding_size(model: PreTrainedModel) -> int:
    words: Any = model.get_input_embeddings()
    return int(words.weight.shape[1])


def _hidden_size(config: PretrainedConfig) -> int:
    return int(config.hidden_size)


def _difference(source: PreTrainedModel, grown: PreTrainedModel) -> float:
    """The largest difference between the outputs of two models for one row of ids, over the largest output."""
    ids = (torch.arange(PROBE_LENGTH) * 7919 % source.config.vocab_size)[None]
    outputs = []
    for model in (source, grown):
        was_training = model.training
        model.eval()
        arguments = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            outputs.append(model(input_ids=ids, **arguments)[0])
        model.train(was_training)
    if outputs[0].shape != outputs[1].shape:  # hidden states of a body, which have become wider
        outputs[1] = outputs[1][..., : outputs[0].shape[-1]]
    first, second = outputs
    return float((first - second).abs().max() / first.abs().max())
