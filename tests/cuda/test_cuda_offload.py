"""States and gradients that wait in host memory over a rollout; their copies come late on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_verl import (
    GRPO,
    Actor,
    AsyncRolloutDataset,
    HybridDataFlow,
    HybridStrategy,
    RewardFunction,
    RLTrainer,
    SamplingParams,
)
from lightning_verl.strategies import rollouts
from lightning_verl.strategies.offload import StateOffload
from lightning_verl.testing import char_tokenizer, tiny_model, tiny_rollouts

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

CYCLES = 400_000_000
"""Of the GPU's clock; about 0.2 s."""


class LateOffload(StateOffload):
    """What is copied on its stream comes late, so that whoever does not wait for it is sure to be too early."""

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:  # type: ignore[override]
        with super()._on_own_stream():
            if self._on_cuda:
                torch.cuda._sleep(CYCLES)
            yield


class GradientsBeforeRollouts:
    """A backward pass of one's own before each rollout: its gradients wait over it, and the update adds to them."""

    def __init__(self) -> None:
        self.held: list[int] = []
        """Bytes of gradients and states that the device has at the end of each rollout."""

    def on_rollout_start(self, trainer: Any) -> None:
        flow, engine = trainer.dataflow, trainer.dataflow.modules["actor"].engine
        rows = tiny_rollouts(vocabulary=len(flow.tokenizer)).to(trainer.fabric.device)
        logprobs, _ = flow._wrapped["actor"](rows)
        trainer.fabric.backward(logprobs.sum() / 100)
        generate = type(engine).generate

        def measured(*args: Any, **kwargs: Any) -> Any:
            made = generate(engine, *args, **kwargs)
            self.held.append(bytes_of(flow.optimizers["actor"]))
            return made

        engine.generate = measured


def bytes_of(optimizer: Any) -> int:
    """What gradients and states of more than one number take on the device."""
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    tensors += [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return sum(value.untyped_storage().nbytes() for value in tensors if value.numel() > 1)


def count_digits(response: str) -> float:
    return float(sum(character.isdigit() for character in response))


def grpo_steps(offload: bool, accelerator: str) -> tuple[list[Tensor], list[int]]:
    """Weights after three steps, and bytes of gradients and states on the device in each rollout."""
    strategy = HybridStrategy(hybrid_engine_config={"offload_to_cpu": offload}, compile_layers=False)
    watch = GradientsBeforeRollouts()
    fabric = Fabric(accelerator=accelerator, devices=1, strategy=strategy, callbacks=[watch])
    fabric.launch()
    tokenizer = char_tokenizer()
    model = tiny_model("qwen3", vocab_size=len(tokenizer), attn_implementation="eager")
    actor = Actor(model, tokenizer=tokenizer, learning_rate=1e-2, engine="transformers")
    trainer = RLTrainer(
        fabric,
        HybridDataFlow(actor, reward=RewardFunction(count_digits), packing="padded"),
        GRPO(kl=0.0),
        AsyncRolloutDataset([{"prompt": "1" * length} for length in (1, 3, 6, 9)], tokenizer=tokenizer, seed=0),
        rollout_batch_size=2,
        samples_per_prompt=4,
        sampling=SamplingParams(max_new_tokens=8),
    )
    metrics = trainer.fit(3)
    assert metrics["actor/skipped_updates"] == 0
    assert (strategy.offload_report is not None) is offload
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return [parameter.detach().cpu().clone() for parameter in actor.parameters()], watch.held


def check_grpo(accelerator: str) -> None:
    """The same weights to the last bit, although gradients and states were away in every rollout."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    kept, held = grpo_steps(False, accelerator)
    again, _ = grpo_steps(False, accelerator)
    torch.testing.assert_close(again, kept, rtol=0, atol=0, msg="a run must repeat itself to show anything")
    moved, away = grpo_steps(True, accelerator)
    torch.testing.assert_close(moved, kept, rtol=0, atol=0)
    size = sum(weights.nbytes for weights in kept)
    assert held == [size, 3 * size, 3 * size]  # gradients, and two moments from the first step on
    assert away == [0, 0, 0]


def test_waiting_in_host_memory_changes_no_bit_of_grpo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "StateOffload", LateOffload)
    check_grpo("cuda")


def trip(offload: StateOffload, optimizer: Any) -> tuple[tuple[bool, bool], tuple[bool, bool]]:
    """To the host and back; whether copies are through when the current stream is, before and after it waits."""
    own = offload._stream
    assert own is not None
    seen = []
    for begin, wait in ((lambda: offload.start([optimizer]), offload.free), (offload.bring_back, offload.wait)):
        for call in (begin, wait):
            call()
            torch.cuda.current_stream().synchronize()
            seen.append(own.query())
    return (seen[0], seen[1]), (seen[2], seen[3])


def test_copies_are_pinned_and_on_a_stream_of_their_own() -> None:
    parameter = nn.Parameter(torch.arange(1000.0, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.square().sum().backward()
    optimizer.step()
    moments = [value for value in optimizer.state[parameter].values() if value.numel() > 1]
    before = [moment.clone() for moment in moments]
    optimizer.zero_grad()
    offload = LateOffload(torch.device("cuda"))
    for _ in range(2):  # pinning memory, which only the first trip does, may itself wait for the device
        away, back = trip(offload, optimizer)
    assert away == (False, True), "copies out hold up whoever takes the memory, and nobody before"
    assert back == (False, True), "copies back hold up whoever uses the states, and nobody before"
    torch.testing.assert_close(moments, before, rtol=0, atol=0)
    assert len(offload._pinned) == 2
    assert all(host.is_pinned() and host.nbytes == 4000 for host in offload._pinned.values())
    parameter.square().sum().backward()
    offload.start([optimizer])
    offload.free()
    offload.bring_back()
    assert parameter.grad is not None
    parameter.grad += 1  # as a backward pass does, which asks nobody
    torch.cuda.synchronize()
    torch.testing.assert_close(parameter.grad, 2 * parameter.detach() + 1, rtol=0, atol=0)
    assert offload.report.out_seconds > 0 < offload.report.back_seconds
