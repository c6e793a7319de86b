"""Activations in host memory: the same gradients, each tensor once. On a CPU copies are plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_verl import Critic, HybridStrategy, Reference
from lightning_verl.parallel import offloading
from lightning_verl.parallel.checkpointing import apply_activation_checkpointing
from lightning_verl.parallel.compiling import compile_layers
from lightning_verl.parallel.offloading import offload_activations
from lightning_verl.testing import tiny_model

IDS = torch.arange(3, 35).view(2, 16)
STATES = 2 * 16 * 64 * 4
"""Bytes of a layer's input."""


def collect_pages(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that gets what each run of a layer keeps on the host."""
    pages: list[Any] = []
    close = offloading._Host.close

    def collect(host: Any, page: Any) -> None:
        pages.append(page)
        close(host, page)

    monkeypatch.setattr(offloading._Host, "close", collect)
    return pages


def sizes(pages: list[Any]) -> list[list[int]]:
    """Bytes of what lies on the host, page after page."""
    return [sorted(copy.host.nbytes for copy in page.copies) for page in pages]


def make_model(mode: Any = None, *, offload: bool = True, backend: str | None = None) -> Any:
    model = tiny_model("qwen2", num_hidden_layers=3).train()
    apply_activation_checkpointing(model, mode)
    if backend is not None:
        compile_layers(model, backend)
    if offload:
        offload_activations(model, least_bytes=2048)
    return model


def gradients(model: Any) -> dict[str, Tensor]:
    model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)[..., 0].mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mode", [None, "full", "selective", ["o_proj", "down_proj"]], ids=str)
def test_gradients_are_the_same(mode: Any) -> None:
    expected, model = gradients(make_model(offload=False)), make_model(mode)
    for _ in range(2):  # two micro-batches: what the first left behind does not reach the second
        model.zero_grad()
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-5)


def test_every_tensor_goes_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = collect_pages(monkeypatch)
    gradients(make_model())
    inner = 2 * STATES
    small = [2 * 16 * 2 * 16 * 4] * 2  # keys and values; log-sum-exp, and what norms divide by, are below 2048 bytes
    # Norms: two inputs and two outputs before the weight, two after it, which q, k and v, and gate and up, have in
    # common. Attention: queries and output. gate, its activation, up, their product.
    assert sizes(pages) == [sorted([*small, *[STATES] * 8, *[inner] * 4])] * 3


def test_with_full_checkpointing_only_inputs_go(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = collect_pages(monkeypatch)
    gradients(make_model("full"))
    assert sizes(pages) == [[STATES]] * 3


def test_at_most_two_layers_wait_for_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = collect_pages(monkeypatch)
    loss = make_model()(input_ids=IDS, use_cache=False).logits.square().mean()
    assert [bool(page.waiting) for page in pages] == [False, True, True]
    loss.backward()
    assert not any(page.waiting for page in pages)


def test_a_graph_may_be_used_twice() -> None:
    model = make_model()
    loss = model(input_ids=IDS, use_cache=False).logits.square().mean()
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.equal(one, other)


def test_two_graphs_may_be_open_at_once() -> None:
    model, plain = make_model(), make_model(offload=False)
    losses = [model(input_ids=ids, use_cache=False).logits.square().mean() for ids in (IDS, IDS.flip(1))]
    (losses[0] + 2 * losses[1]).backward()
    expected = [plain(input_ids=ids, use_cache=False).logits.square().mean() for ids in (IDS, IDS.flip(1))]
    (expected[0] + 2 * expected[1]).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)


def test_the_page_of_the_layer_before_is_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    pages, fetch = collect_pages(monkeypatch), offloading._Host._fetch

    def note(host: Any, page: Any) -> None:
        if not page.fetched:
            fetched.append(pages.index(page))
        fetch(host, page)

    monkeypatch.setattr(offloading._Host, "_fetch", note)
    model, running = make_model(), []
    for number, layer in enumerate(model.model.layers):
        layer.register_full_backward_hook(lambda *_, number=number: running.append((number, list(fetched))))
    gradients(model)
    # When a layer's backward pass has ended, its own page was there, and the one before was on its way.
    assert running == [(2, [2, 1]), (1, [2, 1, 0]), (0, [2, 1, 0])]
    assert all(copy.device is None for page in pages for copy in page.copies)  # freed after use


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "full", "selective"], ids=str)
def test_what_compiled_layers_keep_goes_to_the_host(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    expected = gradients(make_model(offload=False))
    pages = collect_pages(monkeypatch)
    for name, gradient in gradients(make_model(mode, backend="aot_eager")).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-5)
    assert len(pages) == 3
    if mode == "full":  # and the random state of an operator that could draw
        assert sizes(pages) == [[torch.get_rng_state().nbytes, STATES]] * 3
    if mode == "selective":  # keys and values; the input, queries, attention and o_proj
        assert sizes(pages) == [[*[STATES // 2] * 2, *[STATES] * 4]] * 3


def test_without_gradients_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = collect_pages(monkeypatch)
    with torch.no_grad():
        make_model()(input_ids=IDS, use_cache=False)
    assert pages == []


def test_the_strategy_offloads_roles_that_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = collect_pages(monkeypatch)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=HybridStrategy(activation_offload=True))
    fabric.launch()
    for role, count in ((Critic(tiny_model("llama")), 2), (Reference(tiny_model("llama")), 0)):
        pages.clear()
        fabric.setup_module(role)
        role.model(input_ids=IDS, use_cache=False)
        assert len(pages) == count


def test_a_role_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="activation_offload=True: Linear has no decoder layers .* leave it out"):
        offload_activations(nn.Linear(1, 1))
