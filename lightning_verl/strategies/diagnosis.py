"""What went wrong and what to do about it: texts for collectives that hang, layouts that do not match, and idle ranks.

Pure functions; ``strategies.watchdog`` and the trainer call them. What NCCL reads is taken from the page "Environment
Variables" of NVIDIA's user guide.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from lightning_verl.strategies.layout import RoleLayout
from lightning_verl.strategies.recorder import Collective

IDLE_WINDOW = 10
"""Steps that ``advise_ratio`` looks at."""
IDLE_HIGH = 0.2
"""Mean idle share from which waiting is worth a warning."""
IDLE_SWING = 0.3
"""Largest less smallest idle share in the window from which utilisation counts as swinging."""
IDLE_GOAL = 0.1
"""Idle share that the advised ratio aims at."""

_BROKEN = re.compile(
    r"gloo/.*(Timed out waiting|Connection (closed|reset) by peer|Broken pipe|Socket closed)"
    r"|Watchdog caught collective operation timeout|NCCL communicator was aborted|c10d key-value store.*got error",
    re.DOTALL,
)
_CLOSED = re.compile(r"Connection (closed|reset) by peer|Broken pipe|Socket closed")
_MISPLACED = re.compile(
    r"[Ee]xpected all tensors to be on the same device|mixed torch\.Tensor and DTensor|must have the same mesh"
    r"|Cross device mesh comm|should be either on (the )?\w+ or on the same device|should be on the same device"
    r"|is not on the expected device|Input type .* and weight type .* should be the same"
)
_NCCL_VARIABLES: dict[str, tuple[int, int, int]] = {
    "NCCL_DEBUG": (0, 0, 0),
    "NCCL_IB_DISABLE": (0, 0, 0),
    "NCCL_IB_TIMEOUT": (0, 0, 0),
    "NCCL_IB_RETRY_CNT": (2, 1, 15),
    "NCCL_P2P_DISABLE": (0, 0, 0),
    "NCCL_SOCKET_IFNAME": (0, 0, 0),
    "NCCL_SOCKET_RETRY_CNT": (2, 24, 0),
}
"""Variables that decide whether ranks reach each other, and the NCCL that brought each."""
_NOT_NCCL = ("NCCL_SOCKET_TIMEOUT", "NCCL_TIMEOUT")
"""Names that circulate, and that no NCCL reads."""
_TORCH_VARIABLES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")


class CollectiveTimeoutError(RuntimeError):
    """A collective did not finish; names role, phase, group and the ranks that did not come. The run cannot go on."""


class LayoutMismatchError(RuntimeError):
    """Tensors of a role's pass lie outside its layout: on another device, or cut on another mesh."""


@dataclass(frozen=True)
class Note:
    """What a rank last wrote to the board: where it is, and how it fares."""

    number: int
    """It is the rank's how-manieth phase, from 1."""
    role: str
    """Whose phase."""
    phase: str
    """Its name."""
    state: str = "in"
    """``"in"`` the phase; ``"waiting"`` in a collective that does not finish; ``"failed"`` with an error."""
    detail: str = ""
    """The collective, or the error."""

    def __str__(self) -> str:
        return f"{self.role} {self.phase!r}"

    def to_json(self) -> str:
        """One line for the store."""
        return json.dumps(asdict(self))


def is_collective_failure(error: BaseException) -> bool:
    """Whether an error says that a collective timed out or that its other ranks are gone."""
    if isinstance(error, CollectiveTimeoutError | dist.DistStoreError | dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


def is_misplacement(error: BaseException) -> bool:
    """Whether an error says that tensors lie on different devices or meshes."""
    return isinstance(error, RuntimeError | ValueError) and _MISPLACED.search(str(error)) is not None


def how_it_failed(error: BaseException, collective: Collective | None) -> str:
    """One clause: too long, or broken off."""
    if _CLOSED.search(str(error)):
        return "a collective broke off, because a rank of it ended or gave up"
    limit = "its timeout" if collective is None else f"{collective.timeout:g} s"
    return f"a collective did not finish within {limit}"


def timeout_text(
    failure: str,
    own_rank: int,
    own: Note,
    collective: Collective | None,
    notes: Mapping[int, Note | None],
    members: Sequence[int],
) -> str:
    """Say which collective hangs and which ranks are missing.

    Args:
        failure: What happened, see ``how_it_failed``.
        own_rank: This rank.
        own: Where it is.
        collective: What it waits in, where that is known.
        notes: The notes of all other ranks; None for one that never wrote any.
        members: Ranks of the collective's group; empty where it is not known.
    """
    absent = [rank for rank, note in notes.items() if note is None or note.state != "waiting"]
    missing = [rank for rank in absent if rank in members] or absent
    what = "" if collective is None else f" ({collective})"
    text = f"{own}: {failure}{what}."
    if missing:
        seen = " ".join(_last_seen(rank, notes[rank], own_rank, own) for rank in missing)
        return f"{text} Missing ranks: {missing}. {seen}"
    if "broke off" in failure:
        return f"{text} No rank is missing: the others gave up before rank {own_rank} came."
    waiting = "; ".join(f"rank {rank} in {note.detail or note}" for rank, note in notes.items() if note is not None)
    return f"{text} No rank is missing, but they wait in different collectives: {waiting}."


def _last_seen(rank: int, note: Note | None, own_rank: int, own: Note) -> str:
    if note is None:
        return f"Rank {rank} has not entered any phase."
    if note.state == "failed":
        return f"Rank {rank} failed in {note}: {note.detail}."
    if note.number == own.number and str(note) == str(own):
        return f"Rank {rank} is in the same phase, but did not come to this collective."
    return (
        f"Rank {rank} was last seen in {note} (its phase {note.number}; rank {own_rank} is in its phase {own.number})."
    )


def timeout_hints(
    mesh_shape: Sequence[int], backend: str, nccl: tuple[int, ...] | None, environment: Mapping[str, str]
) -> str:
    """What to look at and to try when a collective hangs.

    Args:
        mesh_shape: Ranks of the axes (data, tensor, pipeline, expert).
        backend: "nccl" or "gloo".
        nccl: The version of NCCL, None without one.
        environment: Variables of the process.
    """
    shown = {name: environment.get(name, "unset") for name in (*_NCCL_VARIABLES, *_NOT_NCCL, *_TORCH_VARIABLES)}
    ignored = [*(name for name, since in _NCCL_VARIABLES.items() if nccl and nccl < since), *_NOT_NCCL]
    reader = f"NCCL {'.'.join(map(str, nccl))}" if backend == "nccl" and nccl else "NCCL"
    unread = "" if backend == "nccl" else f"; this run uses {backend}, which reads none of them"
    return (
        "What to do:\n"
        "(1) Read the missing ranks' own output: an error there, a collective that only some ranks enter, or work "
        "longer than the timeout (raise HybridStrategy(timeout=...) or NCCLGroupIsolation(timeout=...)).\n"
        f"(2) {_smaller_mesh(mesh_shape)}\n"
        "(3) Network: NCCL_DEBUG=INFO says what NCCL connects, NCCL_IB_DISABLE=1 takes InfiniBand out of the way. "
        f"Values here: {', '.join(f'{name}={value}' for name, value in shown.items())}. "
        f"{reader} ignores {', '.join(ignored)}: how long a collective may take is torch's timeout of its group, never "
        f"a variable of NCCL{unread}."
    )


def _smaller_mesh(shape: Sequence[int]) -> str:
    """Half the largest axis other than data, its ranks given to data; of data alone, half the processes."""
    shape = tuple(shape)
    inner = max(range(1, len(shape)), key=lambda axis: shape[axis])
    axis = inner if shape[inner] > 1 else 0
    if shape[axis] == 1:
        return "The mesh is of one rank already."
    factor = next(number for number in range(2, shape[axis] + 1) if shape[axis] % number == 0)
    smaller = [*shape]
    smaller[axis] //= factor
    where = f"on {math.prod(smaller)} process(es)"
    if axis:
        smaller[0] *= factor
        where = "on as many processes"
    return f"Try mesh_shape {tuple(smaller)} {where} instead of {shape}: if it runs, the axis that shrank is at fault."


def misplacement_text(note: Note, layout: RoleLayout, device: str, error: BaseException) -> str:
    """Say which role's layout does not match its tensors, and the fix."""
    return (
        f"{note}: the layout does not match the mesh: a tensor lies on another device, or is not cut like the weights. "
        f"The {layout.role} lies on ranks {list(layout.ranks)} as replicas x stages x shards x expert x tensor = "
        f"{layout.replicas} x {layout.pipeline} x {layout.shards} x {layout.expert} x {layout.tensor}, on {device}. "
        "Set the role up with dataflow.setup(fabric) or fabric.setup_module(role), call the role and not the model "
        f"inside it, move your own tensors with .to(fabric.device), and check parallelism_config[{layout.role!r}]. "
        f"torch says: {error}"
    )


@dataclass(frozen=True)
class StepTimes:
    """What a step spent on waiting, in seconds."""

    step: float
    """The whole step."""
    data_wait: float
    """Waiting for prompts."""
    rollout_wait: float
    """Waiting for slower ranks at the end of the rollout."""

    @property
    def idle(self) -> float:
        """The share of the step that was waited."""
        return (self.data_wait + self.rollout_wait) / self.step


def advise_ratio(history: Sequence[StepTimes], rollout_batch_size: int, update_batch_size: int) -> str | None:
    """Say which rollout_batch_size / update_batch_size to use where ranks idle much, or idle now and then.

    What is waited at the end of a rollout is decided by its longest responses and hardly grows with the batch, while
    the work does. At an idle share h, k times the batch leaves h / (h + k (1 - h)), which is the goal g at
    k = h (1 - g) / (g (1 - h)).

    Args:
        history: The steps so far; the last ones count.
        rollout_batch_size: Prompts of a step.
        update_batch_size: Prompts of a mini-batch.

    Returns:
        The advice; None with fewer than ``IDLE_WINDOW`` steps, or where all is well.
    """
    window = history[-IDLE_WINDOW:]
    shares = [times.idle for times in window]
    if len(window) < IDLE_WINDOW:
        return None
    mean, low, high = sum(shares) / len(shares), min(shares), max(shares)
    if mean < IDLE_HIGH and high - low < IDLE_SWING:
        return None
    found = f"over the last {len(window)} steps ranks idled {mean:.0%} of the time ({low:.0%} to {high:.0%} of a step)"
    if sum(times.data_wait for times in window) > sum(times.rollout_wait for times in window):
        return f"{found}, mostly waiting for prompts: raise num_workers and prefetch_factor, or add PrefetchLoader()."
    share = min(mean if mean >= IDLE_HIGH else high, 0.9)
    ratio = rollout_batch_size / update_batch_size
    wanted = max(4, math.ceil(ratio * share * (1 - IDLE_GOAL) / (IDLE_GOAL * (1 - share)) - 1e-9))
    return (
        f"{found}, mostly waiting for the longest responses of a rollout. rollout_batch_size / update_batch_size is "
        f"{ratio:g}; use {wanted}: rollout_batch_size={wanted * update_batch_size} brings the idle share to about "
        f"{IDLE_GOAL:.0%}, at {wanted} updates a rollout (watch actor/clip_fraction). A lower max_new_tokens helps too."
    )
