"""The work of ``lightning-verl tunings``, and the ways to do it: one tuning off and on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lightning_verl.tuning.candidates import LORA
from lightning_verl.tuning.shapes import SHAPES


@dataclass(frozen=True)
class Work:
    """What is done: PPO with actor, critic, reference and reward model of one shape."""

    shape: str = "1.5B"
    """One of ``SHAPES``."""
    prompts: int = 8
    """Prompts of a mini-batch."""
    samples: int = 8
    """Samples of a prompt."""
    prompt_tokens: int = 128
    """Tokens of every prompt."""
    new_tokens: int = 256
    """Tokens of every response."""
    precision: str = "bf16-true"
    """Fabric's."""
    memory_gib: float | None = 40.0
    """Most memory of a GPU, in GiB; None: all of it."""
    micro_batch_tokens: int | None = None
    """Tokens of a micro-batch; None: as many as memory holds, so that memory that a tuning saves buys larger ones."""

    def cache_bytes(self, ranks: int) -> int:
        """Keys and values of a mini-batch's sequences on one of so many data ranks, in 2 bytes."""
        hidden, layers, heads, kv_heads, *_ = SHAPES[self.shape]
        prompts = -(-self.prompts // ranks)
        tokens = prompts * (self.prompt_tokens + self.samples * self.new_tokens)
        return tokens * 2 * layers * kv_heads * (hidden // heads) * 2


@dataclass(frozen=True)
class Arm:
    """One way to do it; the defaults are without any tuning, on one rank."""

    ranks: int = 1
    """Processes."""
    tensor: int = 1
    """Ranks of the tensor axis, of all roles; the others are data ranks."""
    checkpointing: str | list[str] | None = None
    """Of actor and critic."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options of the native engine."""
    lora: dict[str, Any] | None = None
    """Of actor and critic."""
    reward_apart: bool = False
    """Whether the reward model has the last rank for itself."""
    ratio: int = 1
    """Mini-batches that a rollout feeds."""
    isolated: bool = False
    """Whether every role and operation has a group of its own."""
    prefetch: bool = False
    """Whether prompts are tokenised ahead and wait on the device."""

    @property
    def mesh(self) -> tuple[int, int, int, int]:
        """Of the roles that share ranks."""
        return ((self.ranks - self.reward_apart) // self.tensor, self.tensor, 1, 1)

    @property
    def parallelism(self) -> dict[str, dict[str, Any]]:
        """The reward's ranks, where it has some."""
        return {"reward": {"dp": 1, "ranks": [self.ranks - 1]}} if self.reward_apart else {}


@dataclass(frozen=True)
class Claim:
    """A figure that is commonly given for a tuning."""

    text: str
    """As it is given."""
    figure: str = ""
    """What it is of, a key of ``Figures``; empty: nothing that is measured here."""
    change: float = 0.0
    """The change, as a share of the figure without the tuning."""
    absolute: bool = False
    """Whether ``change`` is a difference in place of a share."""


@dataclass(frozen=True)
class Tuning:
    """A row of the table."""

    name: str
    """On the command line."""
    title: str
    """In the table."""
    about: str
    """Off and on, in words."""
    claims: tuple[Claim, ...]
    """What it is commonly said to bring."""
    on: Callable[[Arm, Work], Arm]
    """The way with it, from the way without."""
    needs_ranks: int = 1
    """Ranks that it takes."""


LINEAR_OUTPUTS = ["self_attn.o_proj", "mlp.down_proj"]
"""Layers that a list of suffixes checkpoints."""


def _with_host_cache(arm: Arm, work: Work) -> Arm:
    """Half of the cache on the GPU, and samples that step back go to the host."""
    data = arm.mesh[0]
    return replace(arm, engine={"offload_kvcache": True, "kv_cache_bytes": work.cache_bytes(data) // 2})


TUNINGS = (
    Tuning(
        "layout",
        "mesh layout",
        "off: every role is cut over one tensor axis of all ranks; on: all ranks are data ranks, parameters are "
        "sharded by FSDP2, and each generates with whole weights.",
        (
            Claim("78 to 61 GB", "peak", 61 / 78 - 1),
            Claim("-40% traffic", "received", -0.40),
        ),
        lambda arm, work: replace(arm, tensor=1),
        needs_ranks=2,
    ),
    Tuning(
        "checkpointing",
        "selective checkpointing",
        "attention and the outputs of the matrices around it are kept, the rest of a layer is recomputed.",
        (Claim("-35% memory", "peak", -0.35), Claim("at +12% time", "seconds", 0.12)),
        lambda arm, work: replace(arm, checkpointing="selective"),
    ),
    Tuning(
        "checkpointing-list",
        "`o_proj` and `down_proj` checkpointed",
        "a list of suffixes, each of whose layers is recomputed by itself.",
        (Claim("-9 GB", "peak", -9.0, absolute=True), Claim("at +8% time", "seconds", 0.08)),
        lambda arm, work: replace(arm, checkpointing=LINEAR_OUTPUTS),
    ),
    Tuning(
        "kv-offload",
        "KV offload",
        "on: half of the cache that the rollout needs is on the GPU, samples that step back go to host memory.",
        (Claim("-20% memory", "rollout_peak", -0.20),),
        _with_host_cache,
    ),
    Tuning(
        "lora",
        "LoRA",
        "rank 16 on all linear layers of actor and critic; the reference is the actor without it.",
        (Claim("-50% memory", "peak", -0.50),),
        lambda arm, work: replace(arm, lora=LORA),
    ),
    Tuning(
        "reward",
        "reward on its own GPU",
        "off: the reward model shares the ranks of the others; on: the last rank is its own, and the others have one "
        "less.",
        (
            Claim("142 to 33 ms", "scoring", 33 / 142 - 1),
            Claim("-12 GB", "peak", -12.0, absolute=True),
        ),
        lambda arm, work: replace(arm, reward_apart=True),
        needs_ranks=2,
    ),
    Tuning(
        "ratio",
        "batch ratio 4:1 for 1:1",
        "the mini-batch stays; on: a rollout feeds four of them.",
        (Claim("63 to 92% busy", "busy", 0.29, absolute=True),),
        lambda arm, work: replace(arm, ratio=4),
    ),
    Tuning(
        "groups",
        "isolated groups",
        "on: `NCCLGroupIsolation()`.",
        (
            Claim("87 to 23 ms mean", "mean_latency", 23 / 87 - 1),
            Claim("110 to 28 ms largest", "largest_latency", 28 / 110 - 1),
        ),
        lambda arm, work: replace(arm, isolated=True),
        needs_ranks=2,
    ),
    Tuning(
        "prefetch",
        "prefetch",
        "off: prompts are tokenised when they are asked for; on: four batches ahead, and `PrefetchLoader(4)`.",
        (Claim("none"),),
        lambda arm, work: replace(arm, prefetch=True),
    ),
    Tuning(
        "all",
        "all of them",
        "off: as in the first row; on: everything but a GPU for the reward, which would take it from training. The "
        "cache is not bounded.",
        (Claim("1.2 to 2.5 tokens/s/GPU", "rate", 2.5 / 1.2 - 1),),
        lambda arm, work: Arm(
            ranks=arm.ranks,
            checkpointing="selective",
            engine={"offload_kvcache": True},
            lora=LORA,
            ratio=4,
            isolated=arm.ranks > 1,
            prefetch=True,
        ),
    ),
)
"""In the order of the table."""


def arms_of(tuning: Tuning, ranks: int, work: Work) -> tuple[Arm, Arm]:
    """A tuning off and on.

    Without tunings all roles are cut over the tensor axis alone. But in the rows ``layout`` and ``all``, which measure
    just that, both ways have one data rank for each rank, so that there are shards, gathers and reductions to tune.

    Args:
        tuning: The row.
        ranks: Processes.
        work: What is done.
    """
    tensor = ranks if tuning.name in ("layout", "all") else 1
    off = Arm(ranks=ranks, tensor=tensor)
    return off, tuning.on(off, work)


def key_of(arm: Arm) -> str:
    """A name for an arm: what differs from the defaults."""
    default = asdict(Arm())
    return ", ".join(f"{name}={value}" for name, value in asdict(arm).items() if value != default[name]) or "plain"
