"""What a trial measured."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_verl.tuning.profile import Profile


@dataclass(frozen=True)
class Record:
    """A few steps of a run; what a trial could not measure keeps its default."""

    device: str = "CPU"
    """The GPU's name."""
    ranks: int = 0
    """Processes."""
    memory_bytes: int = 0
    """What tensors of a rank may take: of the GPU, or its share of the machine's memory."""
    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    tokens: list[float] = field(default_factory=list)
    """Prompt and response tokens of each step, over all ranks, the prompt once a sample."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Most bytes that PyTorch had allocated in a phase, over steps and ranks; on a CPU ``{"process": ...}``, the
    largest resident set of a rank."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Those of rank 0, means over the steps."""
    scores: list[float] = field(default_factory=list)
    """Rewards of the valid samples of all steps, over all ranks."""
    bandwidth: float | None = None
    """Bytes a second of a plain all-gather behind the rollout of a step that does not count; None on one rank."""
    received_bytes: int | None = None
    """What collectives brought to a rank in the last step, the mean over ranks; None where it was not all recorded."""
    micro_batch_tokens: int = 0
    """Most tokens of a micro-batch of the actor."""
    profile: Profile | None = None
    """Of rank 0 in one more step, on a GPU."""
    problem: str = ""
    """Why there is no measurement."""
    out_of_memory: bool = False
    """Whether that was memory."""

    @property
    def rates(self) -> list[float]:
        """Tokens a second and rank, of each step."""
        return [tokens / seconds / self.ranks for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    @property
    def rate(self) -> float:
        """Tokens a second and rank, the median of the steps; 0 without any."""
        return statistics.median(self.rates) if self.seconds else 0.0

    @property
    def peak(self) -> int:
        """The largest peak; 0 without any."""
        return max(self.peaks.values(), default=0)


def save(path: Path, record: Record) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(asdict(record)))


def load(path: Path) -> Record:
    """Read a record."""
    return record_of(json.loads(path.read_text()))


def record_of(entry: dict[str, Any]) -> Record:
    """A record from what JSON made of it."""
    profile = entry["profile"]
    return Record(**{**entry, "profile": None if profile is None else Profile(**profile)})
