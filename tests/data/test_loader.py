"""The loader of prompt batches: the stream over epochs, prefetching, resuming and cleaning up."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from lightning_verl.data.experience import PromptBatch
from lightning_verl.data.loader import PromptStream
from lightning_verl.data.prompts import AsyncRolloutDataset
from lightning_verl.data.sharding import rollout_rows

PAD = 0
MODES = [(0, 0), (4, 0), (0, 2), (4, 2)]  # prefetch_factor, num_workers


class CharTokenizer:
    """One token a character. A "!" raises, a "#" kills the process, a "?" waits for `GATE`."""

    pad_token_id, eos_token_id, bos_token = PAD, 2, None

    def __call__(self, texts, add_special_tokens=True):
        for text in texts:
            if "!" in text:
                raise OverflowError("cannot take !")
            if "#" in text:
                os.kill(os.getpid(), signal.SIGKILL)
            if "?" in text:
                GATE.wait(20)
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


GATE = threading.Event()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Every test must leave the threads and processes that it found."""
    GATE.clear()
    threads = set(threading.enumerate())
    yield
    assert wait_until(lambda: set(threading.enumerate()) <= threads)
    assert wait_until(lambda: multiprocessing.active_children() == [])


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return condition()


def dataset(texts, **settings):
    settings = {"shuffle": False, "epochs": 1, **settings}
    return AsyncRolloutDataset([{"prompt": text} for text in texts], tokenizer=CharTokenizer(), **settings)


def texts_of(loader, count=None):
    return [batch.texts for batch in itertools.islice(loader, count)]


# --- the stream -------------------------------------------------------------------------------------------------------


def test_each_epoch_has_its_own_order_from_the_seed():
    stream = PromptStream(10, seed=0, shuffle=True, epochs=None)
    first, second = ([stream.row(position) for position in range(start, start + 10)] for start in (0, 10))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    again = PromptStream(10, seed=0, shuffle=True, epochs=3)
    assert [again.row(position) for position in range(10, 20)] == second
    other = PromptStream(10, seed=1, shuffle=True, epochs=3)
    assert [other.row(position) for position in range(10)] != first


def test_order_is_pinned():
    # a change of this order would silently change what a resumed run sees
    stream = PromptStream(6, seed=7, shuffle=True, epochs=None)
    assert [stream.row(position) for position in range(12)] == [1, 4, 3, 0, 2, 5, 2, 3, 5, 1, 4, 0]


def test_batches_reach_over_the_end_of_an_epoch_and_indices_count_on():
    with dataset("abc", epochs=None).loader(2) as loader:
        batches = [next(loader) for _ in range(4)]
    assert [batch.texts for batch in batches] == [["a", "b"], ["c", "a"], ["b", "c"], ["a", "b"]]
    assert [batch.indices.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert loader.num_batches is None


def test_batch_larger_than_the_data():
    with dataset("ab", epochs=None).loader(5) as loader:
        assert next(loader).texts == ["a", "b", "a", "b", "a"]


def test_repeated_prompt_text_has_its_own_index():
    with dataset(["same", "same"]).loader(2) as loader:
        assert next(loader).indices.tolist() == [0, 1]


@pytest.mark.parametrize(("prefetch_factor", "num_workers"), MODES)
def test_last_short_batch_is_dropped_and_counted(prefetch_factor, num_workers):
    # 7 rows x 2 epochs = 14 prompts = 3 batches of 4 and 2 prompts
    data = dataset("abcdefg", epochs=2, prefetch_factor=prefetch_factor, num_workers=num_workers)
    loader = data.loader(4)
    assert (loader.num_batches, loader.dropped) == (3, 2)
    assert texts_of(loader) == [list("abcd"), list("efga"), list("bcde")]
    assert texts_of(loader) == []
    assert loader.consumed == 3


def test_stream_shorter_than_a_batch_is_an_error():
    with pytest.raises(ValueError, match=r"stream of 6 prompts \(3 rows an epoch\) fills no batch of batch_size=7"):
        dataset("abc", epochs=2).loader(7)


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_size", [1, 2, 3, 5])
def test_ranks_together_hold_each_global_batch_once(data_size):
    data = dataset("abcdefgh", shuffle=True, epochs=None, seed=3)
    with data.loader(4) as loader:
        whole = [next(loader) for _ in range(5)]
    held = [{} for _ in whole]
    for rank in range(data_size):
        with data.loader(4, rollout_rows(4, 2, data_size, rank)) as loader:
            for found, batch in zip(held, loader, strict=False):
                found.update(zip(batch.indices.tolist(), batch.texts, strict=True))
    assert [dict(sorted(found.items())) for found in held] == [
        dict(zip(batch.indices.tolist(), batch.texts, strict=True)) for batch in whole
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rank_without_rows_gets_empty_batches(num_workers):
    with dataset("abcd", num_workers=num_workers).loader(2, []) as loader:
        batches = list(loader)
    assert len(batches) == 2
    for batch in batches:
        assert len(batch) == 0
        assert batch.ids.shape == (0, 1)
        assert batch.lengths.shape == batch.indices.shape == (0,)
        assert (batch.texts, batch.fields) == ([], [])


def test_rows_keep_the_order_that_is_asked_for():
    with dataset("abcd").loader(4, [3, 0]) as loader:
        batch = next(loader)
    assert (batch.texts, batch.indices.tolist()) == (["d", "a"], [3, 0])


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((0,), {}, "batch_size=0, but it must be at least 1"),
        ((2,), {"device_count": 0}, "device_count=0, but it must be at least 1"),
        ((2, [2]), {}, r"rows=\[2\] must be different positions in \[0, 2\)"),
        ((2, [-1]), {}, r"rows=\[-1\] must be different positions"),
        ((2, [0, 0]), {}, r"rows=\[0, 0\] must be different positions"),
    ],
)
def test_loader_settings_out_of_range(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        dataset("abcd").loader(*arguments, **settings)


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefetch_factor", "num_workers"), MODES)
def test_resume_gives_exactly_the_remaining_batches(prefetch_factor, num_workers):
    # 10 prompts x 3 epochs in batches of 2: 15 batches, stopped after 7, in the middle of epoch 2
    settings = {"shuffle": True, "epochs": 3, "prefetch_factor": prefetch_factor, "num_workers": num_workers}
    with dataset("abcdefghij", **settings).loader(2) as loader:
        whole = list(loader)
    assert len(whole) == 15
    with dataset("abcdefghij", **settings).loader(2) as loader:
        for _ in range(7):
            next(loader)
        state = loader.state_dict()
    assert state == {"batches": 7, "rows": 10, "seed": 0, "shuffle": 1, "batch_size": 2}
    with dataset("abcdefghij", **settings).loader(2) as loader:
        loader.load_state_dict(state)
        rest = list(loader)
    assert [batch.texts for batch in rest] == [batch.texts for batch in whole[7:]]
    assert [batch.indices.tolist() for batch in rest] == [batch.indices.tolist() for batch in whole[7:]]
    assert torch.equal(rest[0].ids, whole[7].ids)


def test_state_moves_to_another_number_of_ranks():
    data = dataset("abcdefgh", epochs=None)
    with data.loader(4, [0, 1]) as loader:
        next(loader)
        state = loader.state_dict()
    with data.loader(4) as loader:
        loader.load_state_dict(state)
        assert next(loader).texts == list("efgh")


def test_going_back_forgets_batches_that_are_ready():
    with dataset("abcdef").loader(2) as loader:
        start = loader.state_dict()
        first = texts_of(loader, 2)
        loader.load_state_dict(start)
        assert texts_of(loader, 2) == first
        assert texts_of(loader) == [["e", "f"]]
        loader.load_state_dict(start)  # also after the end
        assert texts_of(loader, 2) == first


@pytest.mark.parametrize(
    ("other", "batch_size", "message"),
    [
        ({"texts": "abcde"}, 2, "rows: saved 4, here 5"),
        ({"seed": 1}, 2, "seed: saved 0, here 1"),
        ({"shuffle": True}, 2, "shuffle: saved 0, here 1"),
        ({}, 4, "batch_size: saved 2, here 4"),
    ],
)
def test_state_of_another_stream_is_refused(other, batch_size, message):
    with dataset("abcd").loader(2) as loader:
        state = loader.state_dict()
    with dataset(**{"texts": "abcd", **other}).loader(batch_size) as loader:
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict(state)
        with pytest.raises(ValueError, match=r"the state lacks \['batches', 'rows'\]"):
            loader.load_state_dict({"seed": 0, "shuffle": 0, "batch_size": 2})


# --- working ahead ----------------------------------------------------------------------------------------------------


def count_builds(monkeypatch):
    built = []
    original = PromptBatch.__init__

    def counting(self, *args, **kwargs):
        built.append(1)
        original(self, *args, **kwargs)

    monkeypatch.setattr(PromptBatch, "__init__", counting)
    return built


@pytest.mark.parametrize(("prefetch_factor", "ready"), [(0, 1), (1, 2), (3, 4)])
def test_prefetch_factor_counts_batches_ahead_across_epochs(monkeypatch, prefetch_factor, ready):
    built = count_builds(monkeypatch)
    with dataset("ab", epochs=None, prefetch_factor=prefetch_factor).loader(2) as loader:
        next(loader)
        assert wait_until(lambda: len(built) >= ready)
        time.sleep(0.05)  # no more are built than were asked for
        assert len(built) == ready


def test_tokenising_does_not_hold_up_the_batches_before():
    with dataset(["a", "b?"], prefetch_factor=2).loader(1) as loader:
        assert next(loader).texts == ["a"]  # while the second batch waits in the background
        GATE.set()
        assert next(loader).texts == ["b?"]


def test_wait_seconds_is_what_the_consumer_waited():
    with dataset(["a", "b?", "c"], prefetch_factor=2).loader(1) as loader:
        next(loader)
        timer = threading.Timer(0.2, GATE.set)
        timer.start()
        next(loader)
        assert loader.wait_seconds > 0.1
        wait_until(lambda: loader._ahead[0].done())
        next(loader)
        assert loader.wait_seconds < 0.1
        timer.join()


def test_rows_tokenised_up_front_are_not_tokenised_again():
    data = dataset("ab", max_prompt_length=4, num_workers=2)
    with data.loader(2) as loader:
        assert multiprocessing.active_children() == []
        assert next(loader).ids.tolist() == [[97], [98]]


# --- errors and cleaning up -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefetch_factor", "num_workers"), MODES)
def test_tokenizer_error_names_the_row_at_its_batch_and_passes_nothing_over(prefetch_factor, num_workers):
    texts = ["a", "b", "c", "d!", "e", "f"]
    with dataset(texts, prefetch_factor=prefetch_factor, num_workers=num_workers).loader(2) as loader:
        assert next(loader).texts == ["a", "b"]
        for _ in range(2):
            with pytest.raises(ValueError, match=r"tokenising row 4 .* failed: OverflowError: cannot take !"):
                next(loader)
        assert loader.consumed == 1


def test_dead_worker_is_reported():
    with dataset(["a", "#"], num_workers=2).loader(1) as loader:
        assert next(loader).texts == ["a"]
        with pytest.raises(RuntimeError, match=r"one of 2 tokenising workers died between row 2 .* and row 2"):
            next(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_close_stops_everything_at_once(num_workers):
    threads = threading.active_count()
    loader = dataset("abcd", num_workers=num_workers, epochs=None).loader(2)
    next(loader)
    assert len(multiprocessing.active_children()) == num_workers
    loader.close()
    loader.close()
    assert threading.active_count() == threads
    assert multiprocessing.active_children() == []
    with pytest.raises(RuntimeError, match="PromptLoader: it is closed"):
        next(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_end_of_the_stream_stops_everything(num_workers):
    threads = threading.active_count()
    loader = dataset("abcd", num_workers=num_workers).loader(2)
    assert len(list(loader)) == 2
    assert threading.active_count() == threads
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dropped_loader_stops_by_itself(num_workers):
    threads = threading.active_count()
    loader = dataset("abcd", num_workers=num_workers, epochs=None).loader(2)
    next(loader)
    del loader
    assert wait_until(lambda: threading.active_count() == threads and multiprocessing.active_children() == [])


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from test_loader import dataset, worker_ids
loader = dataset("abcd", num_workers=2, epochs=None).loader(2)
print(next(loader).texts)
print(*worker_ids(loader))
"""


def worker_ids(loader):
    return list(loader._crew.pool._processes._processes)


def is_running(process_id):
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def assert_two_workers_end(workers):
    assert len(workers) == 2
    ended = wait_until(lambda: not any(map(is_running, workers)))
    for worker in filter(is_running, workers):  # a failing test leaves none behind either
        os.kill(worker, signal.SIGKILL)
    assert ended


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_end_with_a_script_that_closes_nothing(tmp_path):
    """The script has no ``if __name__ == "__main__"``: workers must not run it again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(paths=[os.path.dirname(__file__), *filter(None, sys.path)]))
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    texts, workers = result.stdout.splitlines()
    assert texts == "['a', 'b']"
    assert_two_workers_end([int(worker) for worker in workers.split()])


def load_and_be_killed(results):
    loader = dataset("abcd", num_workers=2, epochs=None).loader(2)
    next(loader)
    results.send(worker_ids(loader))
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_a_process_that_is_killed():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=load_and_be_killed, args=(sender,))
    process.start()
    workers = receiver.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert_two_workers_end(workers)


# --- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "device_count", "warns"), [(0, 1, True), (1, 1, True), (2, 1, False), (2, 2, True)]
)
def test_few_workers_a_device_give_a_warning_where_cuda_is_used(monkeypatch, num_workers, device_count, warns):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    data = dataset("abcd", num_workers=num_workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.loader(2, device_count=device_count).close()
    messages = [str(item.message) for item in caught if "is below 2 a device" in str(item.message)]
    assert len(messages) == int(warns)
    if warns:
        assert f"num_workers={num_workers} is below 2 a device ({2 * device_count} for" in messages[0]


def test_no_warning_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset("abcd", num_workers=1).loader(2).close()
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.parametrize("available", [False, True])
def test_batches_are_pinned_where_cuda_is_available(monkeypatch, available):
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(PromptBatch, "pin_memory", lambda batch: pinned.append(batch) or batch)
    with dataset("ab", num_workers=2).loader(2) as loader:
        batch = next(loader)
    assert pinned == ([batch] if available else [])
