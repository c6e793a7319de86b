"""The one place that knows how the supported versions of torch and transformers differ, and which of vLLM there are."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from datetime import timedelta
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TORCH = SpecifierSet(">=2.11")
TRANSFORMERS = SpecifierSet(">=5.17,<6")
VLLM = SpecifierSet(">=0.22")

_CACHE_RENAMED_IN = Version("5.24")
_ASKS_FOR_GROUPS = Version(torch.__version__).release >= (2, 12)
"""A constant, since compiled layers come by."""


def check_versions(*, vllm: bool = False) -> None:
    """Check that the installed libraries are ones that this package works with.

    A pre-release or a local build counts as the release that it is named after.

    Args:
        vllm: Check vLLM too, because it is going to be used.

    Raises:
        ImportError: A library is missing or its version is outside the range.
    """
    _require("torch", TORCH, _installed("torch"), "2.11 brought the FSDP2 and DTensor calls that are used")
    _require(
        "transformers", TRANSFORMERS, _installed("transformers"), "5.17 brought the attention and cache interfaces"
    )
    if vllm:
        _require("vllm", VLLM, _vllm_version(), "0.22 brought the weight updates of a running engine")


def cache_argument() -> str:
    """The name that a transformers model gives its key-value cache, as an argument of ``forward`` and in its output.

    "cache" from transformers 5.24 on, "past_key_values" before.
    """
    installed = _installed("transformers")
    renamed = installed is not None and _release(installed) >= _CACHE_RENAMED_IN
    return "cache" if renamed else "past_key_values"


def new_group(
    ranks: Sequence[int],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    description: str | None = None,
    options: Any = None,
) -> dist.ProcessGroup:
    """Create a process group whose group ranks follow the order of ``ranks``. Every process of the world must call it.

    Args:
        ranks: World ranks. torch 2.11 sorts them, so there they must ascend.
        backend: "nccl", "gloo", ...; None takes the world's.
        timeout: Of the group's collectives; None takes the backend's default.
        description: A name for logs and the flight recorder.
        options: Options of the backend, such as ``ProcessGroupNCCL.Options`` with a stream of high priority.

    Returns:
        The group; outside ``ranks`` torch's ``GroupMember.NON_GROUP_MEMBER``.

    Raises:
        ValueError: This torch would sort ``ranks`` into another order.
    """
    order: dict[str, Any] = {}
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        order["sort_ranks"] = False
    elif list(ranks) != sorted(ranks):
        raise ValueError(
            f"new_group: ranks {list(ranks)} do not ascend, and torch {_installed('torch')} would sort them silently. "
            "Lay the mesh out in ascending order, or install torch>=2.13."
        )
    return dist.new_group(  # type: ignore[no-any-return]
        list(ranks), timeout=timeout, backend=backend, pg_options=options, group_desc=description, **order
    )


def all_gather_flat(
    output: Tensor, tensor: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Gather ``tensor`` of every rank into ``output``, one after the other. torch 2.13 renamed the call.

    Args:
        output: As many elements as all ranks have together.
        tensor: This rank's.
        group: None takes the world.
        async_op: Whether to return before it is done.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(output, tensor, group=group, async_op=async_op)
    return work


def reduce_scatter_flat(
    output: Tensor,
    tensor: Tensor,
    operation: dist.ReduceOp.RedOpType | dist.ReduceOp,
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce ``tensor`` over ranks and leave each its part in ``output``. torch 2.13 renamed the call.

    Args:
        output: This rank's part.
        tensor: The parts of all ranks, one after the other.
        operation: How to reduce.
        group: The ranks.
        async_op: Whether to return before it is done.
    """
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = scatter(output, tensor, op=operation, group=group, async_op=async_op)
    return work


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float,
    window: int | None,
) -> Tensor:
    """Causal attention over sequences of unequal length, by torch's kernel (CUDA, bf16 or fp16).

    The last query of a sequence sees all its keys, the one before all but one, and so on: fewer queries than keys go
    on from what the first keys are of. torch 2.12 began to ask whether heads are grouped.

    Args:
        query: ``[T, H, D]``.
        key: ``[L, K, D]``.
        value: ``[L, K, D]``.
        starts: Where each sequence's queries and keys start and the last one's end, int32 ``[S + 1]`` each.
        longest: Most queries and most keys of a sequence.
        scaling: What scores are multiplied by.
        window: Keys that a query sees, itself included; None: all.

    Returns:
        ``[T, H, D]``.
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"enable_gqa": True} if _ASKS_FOR_GROUPS else {}
    window_size = (window - 1 if window else -1, 0)
    return varlen_attn(  # type: ignore[return-value]
        query, key, value, *starts, *longest, scale=scaling, window_size=window_size, **options
    )


def varlen_attention_operator() -> Any:
    """The operator that ``varlen_attention`` comes down to; None where torch names it otherwise than up to 2.13."""
    importlib.import_module("torch.nn.attention.varlen")  # registers it; takes a second
    return getattr(getattr(torch.ops.torch_attn, "_varlen_attn", None), "default", None)


def checkpoint_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and split weights to how a checkpoint on disk holds them; packed experts are one tensor each there.

    Args:
        model: The model that the weights are of.
        weights: Tensors by the names of its parameters.
    """
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, weights) if weights else {}
    return reverted


def _require(name: str, supported: SpecifierSet, installed: str | None, reason: str) -> None:
    if installed is not None and supported.contains(_release(installed)):
        return
    found = "is not installed" if installed is None else f"{installed} is installed"
    raise ImportError(
        f"lightning_verl needs {name}{supported}, but {name} {found} ({reason}). Run `pip install '{name}{supported}'`."
    )


def _release(version: str) -> Version:
    return Version(Version(version).base_version)


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _vllm_version() -> str | None:
    """From the module, not the distribution: vLLM's CPU build is named differently, a carried copy has no name."""
    try:
        return str(importlib.import_module("vllm").__version__)
    except ModuleNotFoundError as error:
        if error.name != "vllm":  # vLLM is there but one of its own dependencies is not
            raise
        return None


def model_class_of(factory: Any, config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that an auto class of transformers builds for a config; None where there is not exactly one."""
    found = factory._model_mapping.get(type(config), None)
    return found if isinstance(found, type) else None
