"""Where the layers of a model are cut into stages: plain arithmetic over what each part of it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate


@dataclass(frozen=True)
class Costs:
    """What the parts of a model cost, in parameters that a token is multiplied with."""

    layers: tuple[int, ...]
    """Each decoder layer."""
    first: int = 0
    """What comes before the layers: nothing for an embedding, which is looked up."""
    last: int = 0
    """What comes behind them: final norm and output head."""


def cut_layers(costs: Costs, stages: int) -> list[range]:
    """Cut layers into consecutive stages so that the costliest costs as little as can be.

    Of several such cuts one is taken whose stages keep the fewest layers' activations: stage s of P waits for the
    gradients of P - s micro-batches at once.

    Args:
        costs: What the parts of the model cost.
        stages: Stages, each of at least one layer.

    Returns:
        The layers of each stage.

    Raises:
        ValueError: There are more stages than layers.
    """
    count = len(costs.layers)
    if not 1 <= stages <= count:
        raise ValueError(f"cut_layers: {stages} stages of {count} layers; each stage takes at least one layer.")
    sums = [0, *accumulate(costs.layers)]

    def cost(start: int, end: int, stage: int) -> float:
        return sums[end] - sums[start] + costs.first * (start == 0) + costs.last * (end == count)

    least, _ = _best_cut(count, stages, cost)

    def kept(start: int, end: int, stage: int) -> float:
        return math.inf if cost(start, end, stage) > least else (end - start) * (stages - stage)

    _, ends = _best_cut(count, stages, kept)
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def _best_cut(count: int, stages: int, measure: Callable[[int, int, int], float]) -> tuple[float, tuple[int, ...]]:
    """The cut whose largest measure is smallest: that measure, and where the stages end.

    Args:
        count: Layers.
        stages: Stages.
        measure: Of a stage, from its first layer, the one behind its last, and its number.
    """

    @cache
    def best(start: int, stage: int) -> tuple[float, tuple[int, ...]]:
        if stage == stages - 1:
            return measure(start, count, stage), (count,)
        found = []
        for end in range(start + 1, count - (stages - stage - 1) + 1):
            worst, ends = best(end, stage + 1)
            found.append((max(measure(start, end, stage), worst), (end, *ends)))
        return min(found, key=lambda choice: choice[0])

    return best(0, 0)


def stages_of(rank: int, ranks: int, chunks: int) -> tuple[int, ...]:
    """The stages that a rank of the pipeline has: with several chunks, every ``ranks``-th one."""
    return tuple(range(rank, ranks * chunks, ranks))


def describe(ranges: Sequence[range]) -> str:
    """The layers of stages in words, such as ``0-13, 14-27``."""
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in ranges)
