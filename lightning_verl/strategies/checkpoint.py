"""One checkpoint directory for many roles and optimizers, loadable on another layout and number of ranks.

Layout of a directory: ``*.distcp`` files with tensors and their ``.metadata`` (torch's distributed checkpoint), and
``state.pt`` with everything that is no tensor of a role. It is written under a temporary name and renamed last, so
that a directory with the final name is whole.

A role may lie on some of the ranks only. On the others its module is on torch's meta device: there it has names and
shapes, but neither gives nor takes a tensor.
"""

from __future__ import annotations

import math
import pickle
import shutil
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lightning_verl.models.quantize import quantized_parameters
from lightning_verl.parallel.fsdp import reshard

_STATE_FILE = "state.pt"
LEAST_IN_BLOCKS = 4096
"""Elements of a part from which torchao holds it in blocks, if they divide it."""
_HOW_IT_RUNS = (".fused", ".foreach")
"""Options of an optimizer that depend on where its parameters lie here, and change no result."""
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_Tensors = dict[str, Tensor]
_Name = TypeVar("_Name", bound=Hashable)


class CheckpointMismatchError(ValueError):
    """A checkpoint does not hold what it is to be loaded into."""


class _SafeUnpickler(pickle.Unpickler):
    """Reads a checkpoint's metadata and refuses to build anything but torch's own description of tensors."""

    _ALLOWED_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _ALLOWED = {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "Path"),
    }

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (module in self._ALLOWED_MODULES or (module, name) in self._ALLOWED or dtype):
            raise pickle.UnpicklingError(f"checkpoint metadata names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """torch's reader, with metadata read by ``_SafeUnpickler``."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = cast(Metadata, _SafeUnpickler(file).load())
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata


def save(path: Path, state: Mapping[str, Any], role_of: Callable[[Optimizer], str]) -> None:
    """Write modules, optimizers and other state (a collective call).

    Args:
        path: The directory to publish. An existing checkpoint there is replaced once the new one is whole.
        state: By name: modules, optimizers, objects whose ``tensors()`` are loaded in place, objects with
            ``state_dict``, and plain values.
        role_of: The role that an optimizer belongs to.
    """
    temporary = path.with_name(path.name + ".incomplete")
    tensors, plain = _split(state, role_of)
    plain["scalars"] = _join_entries(plain["scalars"])
    plain["tensor_names"] = list(plain["scalars"])
    _on_first_rank(lambda: _make_anew(temporary))
    if tensors or dist.is_initialized():
        with _single_process_is_fine():
            dcp.save(tensors, checkpoint_id=str(temporary), no_dist=not dist.is_initialized())
    _on_first_rank(lambda: _publish(plain, temporary, path))


def load(path: Path, state: dict[str, Any], role_of: Callable[[Optimizer], str], strict: bool) -> dict[str, Any]:
    """Load a checkpoint into ``state``, in place (a collective call). Nothing is changed if it does not fit.

    Args:
        path: A directory that ``save`` wrote.
        state: What to load into, by the names it was saved under; plain values are replaced in the dictionary.
        role_of: The role that an optimizer belongs to.
        strict: Whether a name of ``state`` that the checkpoint lacks is an error.

    Returns:
        What the checkpoint holds beyond ``state``.

    Raises:
        FileNotFoundError: There is no whole checkpoint at ``path``.
        CheckpointMismatchError: A name is missing, a tensor has another shape, an optimizer is of another kind, or the
            blocks of 8-bit moments do not fit this layout.
    """
    if not (path / _STATE_FILE).is_file():
        raise FileNotFoundError(f"No whole checkpoint at {path}: {_STATE_FILE} is missing there.")
    plain = torch.load(path / _STATE_FILE, map_location="cpu", weights_only=True)
    saved_names = set(plain["tensor_names"]) | set(plain["values"])
    wanted = {name: item for name, item in state.items() if name in saved_names}
    targets, here = _split(wanted, role_of)
    reader = _Reader(str(path))
    holds_tensors = (path / ".metadata").is_file()
    everywhere = _keys_everywhere(targets)
    with _on_every_rank():
        if strict:
            _check_names(path, saved_names, state)
        if holds_tensors:
            metadata = reader.read_metadata()
            _check_shapes(path, metadata, targets, everywhere)
            for name, tensors in targets.items():
                if isinstance(block := getattr(wanted[name], "block_size", None), int):
                    _check_blocks(path, name, metadata, tensors, block)
        _check_options(path, plain["scalars"], here["scalars"])
    if holds_tensors:  # all ranks read it together, also those that take nothing
        with _single_process_is_fine():
            dcp.load(targets, storage_reader=reader, no_dist=not dist.is_initialized())
    _put_back(wanted, targets, plain["scalars"], here["scalars"], role_of)
    for name in list(wanted):
        if name in plain["values"]:
            value = plain["values"].pop(name)
            if hasattr(wanted[name], "load_state_dict"):
                wanted[name].load_state_dict(value)
            else:
                state[name] = value
    return {name: value for name, value in plain["values"].items() if name not in state}


def _split(state: Mapping[str, Any], role_of: Callable[[Optimizer], str]) -> tuple[dict[str, _Tensors], dict[str, Any]]:
    """Divide a state into tensors of roles, for the distributed checkpoint, and everything else."""
    modules = {str(module.role): module for module in state.values() if isinstance(module, nn.Module)}
    tensors: dict[str, _Tensors] = {}
    plain: dict[str, Any] = {"values": {}, "scalars": {}}
    for name, item in state.items():
        entries = _entries(name, item, modules, role_of)
        if entries is None:
            plain["values"][name] = item.state_dict() if hasattr(item, "state_dict") else item
        elif not any(isinstance(value, Tensor) and value.is_meta for value in entries.values()):
            found = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
            plain["scalars"][name] = {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
            if found:
                tensors[name] = found
    return tensors, plain


def _entries(
    name: str, item: Any, modules: Mapping[str, nn.Module], role_of: Callable[[Optimizer], str]
) -> Mapping[str, Any] | None:
    """The tensors and scalars of a part of a role, on the meta device where others hold it; None for all else."""
    if isinstance(item, nn.Module):
        reshard(item)
        codes = quantized_parameters(item)  # frozen: they come from where the role's model comes from
        whole = get_model_state_dict(item)
        return {key: value for key, value in whole.items() if not _belongs_to(key, codes)} if codes else whole
    if hasattr(item, "tensors"):
        return item.tensors()  # type: ignore[no-any-return]
    if not isinstance(item, Optimizer):
        return None
    module = modules.get(role_of(item))
    if module is None:
        raise ValueError(
            f"Checkpoint state {name!r} is the optimizer of role {role_of(item)!r}, whose module is not in the state; "
            "add it, for its parameters' names."
        )
    if _is_elsewhere(module):
        return dict(module.named_parameters())
    return cast(Mapping[str, Any], get_optimizer_state_dict(module, item, options=_OPTIONS))


def _belongs_to(key: str, codes: Iterable[str]) -> bool:
    """Whether an entry of a state is of a weight in 4 bits: its codes, or what expands them."""
    return any(key == name or key.startswith(f"{name}.") for name in codes)


def _is_elsewhere(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def _put_back(
    state: Mapping[str, Any],
    tensors: dict[str, _Tensors],
    saved: Mapping[str, Mapping[str, Any]],
    here: Mapping[str, Mapping[str, Any]],
    role_of: Callable[[Optimizer], str],
) -> None:
    modules = {str(module.role): module for module in state.values() if isinstance(module, nn.Module)}
    for name, item in state.items():
        if isinstance(item, nn.Module) and name in tensors:
            strict = StateDictOptions(strict=not quantized_parameters(item))
            set_model_state_dict(item, cast(dict[str, Any], tensors[name]), options=strict)
        elif isinstance(item, Optimizer) and not _is_elsewhere(modules[role_of(item)]):
            how = {key: value for key, value in here[name].items() if key.endswith(_HOW_IT_RUNS)}
            entries = {**tensors.get(name, {}), **saved[name], **how}
            set_optimizer_state_dict(modules[role_of(item)], item, entries, options=_OPTIONS)


def _check_names(path: Path, saved_names: set[str], state: Mapping[str, Any]) -> None:
    missing = [name for name in state if name not in saved_names]
    if missing:
        raise CheckpointMismatchError(
            f"The checkpoint at {path} holds {sorted(saved_names)} but not {missing}. Remove these from the state, or "
            "load with strict=False."
        )


def _check_shapes(
    path: Path, metadata: Metadata, targets: dict[str, _Tensors], everywhere: Mapping[str, set[str]]
) -> None:
    """Refuse a checkpoint whose tensors are not those of all ranks (``everywhere``), or have other shapes than here."""
    for name, tensors in targets.items():
        saved = [key for key in metadata.state_dict_metadata if key.startswith(f"{name}.")]
        saved_keys = {key.removeprefix(f"{name}.") for key in saved}
        if beyond := sorted(saved_keys - everywhere[name]):
            raise CheckpointMismatchError(
                f"The checkpoint at {path} is of another architecture: it holds {name}.{beyond[0]} and "
                f"{len(beyond) - 1} more tensors that there is no place for here. Build the roles with the config "
                "that it was saved from."
            )
        for key, tensor in tensors.items():
            entry = metadata.state_dict_metadata.get(f"{name}.{key}")
            shape = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
            if shape != tuple(tensor.shape):
                found = f"has shape {shape} there" if shape else "is not in it"
                raise CheckpointMismatchError(
                    f"The checkpoint at {path} is of another architecture: {name}.{key} has shape "
                    f"{tuple(tensor.shape)} here and "
                    f"{found}. Build the roles with the config that it was saved from."
                )


def _check_options(path: Path, saved: Mapping[str, Mapping[str, Any]], here: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse the state of an optimizer that lacks options which the one here has."""
    for name, options in here.items():
        if missing := sorted({key.rpartition(".")[2] for key in options.keys() - saved.get(name, {}).keys()}):
            raise CheckpointMismatchError(
                f"The checkpoint at {path} holds another optimizer as {name}, without the options {missing}. Build the "
                "role with the optimizer that it was saved with, or leave this name out of the state for new moments."
            )


def _check_blocks(path: Path, name: str, metadata: Metadata, tensors: _Tensors, block: int) -> None:
    """Refuse moments in blocks with a scale each where this rank's part begins or ends inside of a block."""
    for key, tensor in tensors.items():
        saved = metadata.state_dict_metadata.get(f"{name}.{key}")
        if not isinstance(saved, TensorStorageMetadata):
            continue
        for mine in _create_chunk_list(tensor):
            if any(_cuts_block(part, common, block) for part, common in _common(mine, saved.chunks)):
                raise CheckpointMismatchError(
                    f"The checkpoint at {path} holds {name}.{key} in blocks of {block} elements, and this rank's part "
                    f"of it, {tuple(mine.sizes)} at {tuple(mine.offsets)} of {tuple(tensor.shape)}, begins or ends "
                    "inside of one. Load it on the layout that it was saved from, or leave this name out of the state "
                    "for new moments."
                )


_Box = list[tuple[int, int]]
"""Where a part of a tensor begins and ends in each dim."""


def _common(mine: ChunkStorageMetadata, saved: Iterable[ChunkStorageMetadata]) -> Iterator[tuple[_Box, _Box]]:
    """What parts have in common with the saved ones, each time with both: ``(part, common)``."""
    own = _box(mine)
    for other in map(_box, saved):
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, other, strict=True)]
        if all(begin < end for begin, end in both):
            yield own, both
            yield other, both


def _box(chunk: ChunkStorageMetadata) -> _Box:
    return [(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]


def _cuts_block(part: _Box, common: _Box, block: int) -> bool:
    """Whether some of a part cannot be taken out of it without cutting a block."""
    numel = math.prod(end - begin for begin, end in part)
    if part == common or numel < LEAST_IN_BLOCKS or numel % block:
        return False  # whole, or not in blocks
    row = numel // (part[0][1] - part[0][0])
    return part[1:] != common[1:] or any((end - part[0][0]) * row % block for end in common[0])


@contextmanager
def _single_process_is_fine() -> Iterator[None]:
    """Keep torch from warning that there is no process group: one process needs none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _publish(plain: dict[str, Any], temporary: Path, path: Path) -> None:
    torch.save(plain, temporary / _STATE_FILE)
    previous = path.with_name(path.name + ".replaced")
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)  # left by a save that was killed
        path.rename(previous)
    temporary.rename(path)
    shutil.rmtree(previous, ignore_errors=True)


def join_over_ranks(part: Mapping[_Name, Any]) -> dict[_Name, Any]:
    """Join what the ranks hold by name (a collective call): all of rank 0's, and of the others what ranks before lack.

    Args:
        part: This rank's.

    Returns:
        What all ranks hold on rank 0; on the others, what they and other ranks above 0 do.
    """
    joined = dict(part)
    if dist.is_initialized():
        box = [list(part)]
        dist.broadcast_object_list(box, src=0)
        parts: list[dict[_Name, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(parts, {name: value for name, value in part.items() if name not in box[0]})
        for other in parts:
            joined = {**other, **joined}
    return joined


def _join_entries(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Join entries of two levels over ranks (a collective call): the stages of a pipeline have some of a role's each.

    Args:
        parts: This rank's entries, by name of the part and key in it.

    Returns:
        Those of all ranks on rank 0, on the others what they and other ranks above 0 have.
    """
    joined: dict[str, dict[str, Any]] = {name: {} for name in join_over_ranks(dict.fromkeys(parts))}
    flat = {(name, key): value for name, entries in parts.items() for key, value in entries.items()}
    for (name, key), value in join_over_ranks(flat).items():
        joined[name][key] = value
    return joined


def _keys_everywhere(targets: Mapping[str, _Tensors]) -> dict[str, set[str]]:
    """The names of the tensors that any rank wants (a collective call), by name of the part."""
    joined = _join_entries({name: dict.fromkeys(tensors) for name, tensors in targets.items()})
    box = [{name: set(entries) for name, entries in joined.items()}]  # of all ranks on rank 0 only
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


@contextmanager
def _on_every_rank() -> Iterator[None]:
    """Fail on all ranks where a check fails on one: a rank may hold a role that the others do not.

    Raises:
        CheckpointMismatchError: A check failed; the error itself where it did, its text elsewhere.
    """
    problem: CheckpointMismatchError | None = None
    try:
        yield
    except CheckpointMismatchError as error:
        problem = error
    if dist.is_initialized():
        texts: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, None if problem is None else str(problem))
        rank, text = next(((rank, text) for rank, text in enumerate(texts) if text is not None), (0, None))
        if problem is None and text is not None:
            problem = CheckpointMismatchError(f"on rank {rank}: {text}")
    if problem is not None:
        raise problem


def _on_first_rank(action: Callable[[], None]) -> None:
    """Run something on rank 0 while the others wait, and let all of them learn how it ended.

    Raises:
        OSError: It failed; the error itself on rank 0, its text on the others.
    """
    problem: OSError | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except OSError as error:  # a full disk on rank 0 is not to leave the others waiting
            problem = error
    if dist.is_initialized():
        box = [None if problem is None else str(problem)]
        dist.broadcast_object_list(box, src=0)
        if problem is None and box[0] is not None:
            problem = OSError(f"rank 0 could not write the checkpoint: {box[0]}")
    if problem is not None:
        raise problem
