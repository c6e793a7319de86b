"""What lives as long as a run is set aside from garbage collections while it runs."""

from __future__ import annotations

import gc
import weakref

from lightning_verl.heap import LongLived


class Ring:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_objects_are_set_aside_before_the_third_step() -> None:
    heap, found = LongLived(), gc.get_freeze_count()
    frozen = []
    for _ in range(4):
        heap.on_step_start()
        frozen.append(gc.get_freeze_count() - found)
    assert frozen[:2] == [0, 0]
    assert frozen[2] == frozen[3] > 1000
    heap.release()
    assert gc.get_freeze_count() == 0


def test_cycles_are_freed_before_and_after() -> None:
    heap = LongLived()
    early = weakref.ref(Ring())
    for _ in range(3):
        heap.on_step_start()
    assert early() is None
    late = weakref.ref(Ring())
    gc.collect()
    assert late() is None
    heap.release()


def test_a_run_that_did_not_freeze_releases_nothing() -> None:
    gc.freeze()
    try:
        heap = LongLived()
        heap.on_step_start()
        heap.release()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
