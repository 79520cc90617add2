"""The check of what an optimizer must do where engines divide tensors among processes.

Two processes are played one after the other, by the rules of the engines: `build` sees the whole module, and then the
groups hold what the process updates, one group after another as under ZeRO. A process has a part of each tensor that
the optimizer declares to be elementwise, and each second one of the others, whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from terakoya.components import Optimizer
from terakoya.training.engines.tensor_shards import whole_names
from terakoya_contract.results import CheckFailed, CheckSkipped
from terakoya_contract.settings import Case

PROCESSES, STEPS = 2, 4
TOLERANCE = 1e-5
"""Of the largest change of a tensor: kernels round parts of tensors differently."""

Gradients = list[dict[str, Tensor]]
"""The gradients of each step, by the names of weights."""


class _Network(nn.Module):
    """Weights of several shapes: an embedding, blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 9, bias=False)


def check_shards(case: Case) -> None:
    """On parts of tensors, or on some of the tensors, it takes the same steps as on all, as it declares."""
    settings = case.settings_of(Optimizer)
    if not settings.elementwise and not settings.tensorwise:
        raise CheckSkipped(
            "it declares that its updates depend on other tensors too (elementwise and tensorwise are False): it runs "
            'with engine "ddp" alone, and fsdp, ZeRO and tensor parallelism refuse it'
        )
    torch.manual_seed(0)
    whole = _Network()
    start = {name: value.detach().clone() for name, value in whole.named_parameters()}
    gradients = [{name: torch.randn_like(value) for name, value in start.items()} for _ in range(STEPS)]
    optimizer = settings.build(whole, fused=False)
    weights = dict(whole.named_parameters())
    for step in gradients:
        for name, value in weights.items():
            value.grad = step[name].clone()
        optimizer.step()
    for process in range(PROCESSES):
        try:
            updated = list(_update_parts(settings, start, gradients, process))
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            raise CheckFailed(_explain(settings, f"`step` raised {type(error).__name__}: {error}")) from error
        for name, found, elements in updated:
            whole_value = weights[name].detach()
            size = float((whole_value - start[name]).abs().max())
            error_found = float((found.flatten() - whole_value.flatten()[elements]).abs().max())
            if not error_found <= TOLERANCE * size:
                stayed = torch.equal(found.flatten(), start[name].flatten()[elements])
                said = (
                    "not at all"
                    if stayed
                    else f"differently, by {error_found / (size or 1.0):.1g} of the largest update"
                )
                raise CheckFailed(_explain(settings, f"{name} is updated {said}"))


def _explain(settings: Optimizer, happened: str) -> str:
    if settings.elementwise:
        return (
            f"it declares that its updates are elementwise, but on parts of tensors {happened}. Set `elementwise: "
            "ClassVar[bool] = False`, and `tensorwise: ClassVar[bool] = True` if an update depends on its own tensor "
            "only; keep state in self.state[parameter]"
        )
    return (
        f"it declares that its updates are tensorwise, but on some of the tensors {happened}. `step` must update what "
        "self.param_groups hold when it is called, which are other tensors than `build` was given, and keep state in "
        "self.state[parameter]; if updates depend on other tensors, set `tensorwise: ClassVar[bool] = False`"
    )


def _update_parts(
    settings: Optimizer, start: Mapping[str, Tensor], gradients: Gradients, process: int
) -> Iterator[tuple[str, Tensor, slice]]:
    """Yields the names of the tensors that `process` updates, the values after all steps, and which elements of the
    flattened tensors these are."""
    module = _Network()
    module.load_state_dict(start)
    optimizer = settings.build(module, fused=False)
    names = {id(value): name for name, value in module.named_parameters()}
    seen_whole = whole_names(settings, optimizer.param_groups, names)
    owned = set(sorted(seen_whole)[process::PROCESSES])
    held: dict[str, nn.Parameter] = {}
    elements: dict[str, slice] = {}
    for name, value in start.items():
        cut = value.numel() // 3  # within a row
        elements[name] = slice(None) if name in seen_whole else slice(0, cut) if process == 0 else slice(cut, None)
        if name in owned:
            held[name] = nn.Parameter(value.clone())
        elif name not in seen_whole:
            held[name] = nn.Parameter(value.flatten()[elements[name]].clone())
    for group in optimizer.param_groups:
        group["params"] = [held[names[id(each)]] for each in group["params"] if names[id(each)] in held]
    groups = optimizer.param_groups
    for step in gradients:
        for name, value in held.items():
            value.grad = step[name].flatten()[elements[name]].view_as(value).clone()
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups
    for name, value in held.items():
        yield name, value.detach(), elements[name]
