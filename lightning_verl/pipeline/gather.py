"""All weights of a model in one place, whole, whichever ranks and stages hold its parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from lightning_verl.parallel.fsdp import reshard


def whole_state(model: nn.Module, pipeline: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """The state of a model, whole and on the CPU of the first rank (a collective call of the role's ranks).

    Args:
        model: The model, or a role, of which this rank may hold a stage.
        pipeline: This rank's stages; None: there is one.

    Returns:
        Tensors by name on rank 0 of the world, or of a pipeline on the first stage; others may get nothing.
    """
    reshard(model)
    if pipeline is None or pipeline.size() == 1:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(model, options=options))  # type: ignore[arg-type]
    own: dict[str, Any] = get_model_state_dict(model)
    lists: list[list[tuple[str, torch.Size, torch.dtype]]] = [[]] * pipeline.size()
    dist.all_gather_object(lists, [(name, part.shape, part.dtype) for name, part in own.items()], group=pipeline)
    device = next(model.parameters()).device
    state: dict[str, Tensor] = {}
    for stage, entries in enumerate(lists):
        for name, shape, dtype in entries:  # one at a time: no device holds more of the whole than a tensor
            if pipeline.rank() == stage:
                part = own[name]
                whole = (part.full_tensor() if isinstance(part, DTensor) else part.detach()).contiguous()
            else:
                whole = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(whole, group=pipeline, group_src=stage)
            if pipeline.rank() == 0:
                state[name] = whole.cpu()
    return state
