"""Python's garbage collector, kept from walking through what lives as long as a run."""

from __future__ import annotations

import gc

_SETTLING = 2
"""Steps in which kernels are compiled and an engine is built: what they leave behind stays."""


class LongLived:
    """What the first steps of a run made, out of the garbage collector's sight until the run ends.

    Now and then a collection visits every object of the process: those of models, optimizers, compilers. That takes up
    to half a second, on each rank at another moment, and all others wait in their next collective. Objects without
    cycles are freed at once as ever, and cycles that are made later are found as ever.
    """

    def __init__(self) -> None:
        self._started = 0
        self._frozen = False

    def on_step_start(self) -> None:
        """Take note of a step; before the third one what is there is set aside."""
        self._started += 1
        if self._started == _SETTLING + 1:
            gc.collect()  # cycles that hold memory would be set aside as well
            gc.freeze()
            self._frozen = True

    def release(self) -> None:
        """Let the collector see everything again."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False
