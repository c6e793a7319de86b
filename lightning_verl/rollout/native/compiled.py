"""The decoder layers of a model, compiled, with linear layers of the same input side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional
from transformers import PreTrainedModel

_LEFT_OUT = (nn.ModuleList, nn.Embedding, nn.Dropout)


class CompiledLayers:
    """The decoder layers of a model, and what stands before and behind them, compiled; only used inside ``enabled``.

    Args:
        model: The model. All its layers share what the first of a kind compiles to.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        count = model.config.get_text_config().num_hidden_layers
        stack, layers = next(
            (module, child)
            for module in model.base_model.modules()
            for child in module.children()
            if isinstance(child, nn.ModuleList) and len(child) == count
        )
        # Rotary embeddings and the last norm: some twenty kernels where they are not compiled.
        others = [child for child in stack.children() if not isinstance(child, _LEFT_OUT)]
        modules: list[Any] = [*layers, *others]
        self._compiled = [(each, torch.compile(each._call_impl, backend=_backend, dynamic=True)) for each in modules]

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Let calls of the layers run what was compiled; what training compiled or recomputes waits meanwhile."""
        before: list[tuple[Any, Any, Any]] = []
        try:
            for layer, compiled in self._compiled:
                before.append((layer, layer._compiled_call_impl, vars(layer).pop("forward", None)))
                layer._compiled_call_impl = compiled
            yield
        finally:
            for layer, compiled, forward in before:
                layer._compiled_call_impl = compiled
                if forward is not None:
                    layer.forward = forward


def _backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor, after :func:`join_projections`."""
    join_projections(graph)
    return lookup_backend("inductor")(graph, list(inputs))


def join_projections(graph: torch.fx.GraphModule) -> None:
    """Let linear layers of the same input (query, key and value; the two of a gated MLP) be one operator, in place.

    While few sequences decode, one of them alone leaves most of a GPU idle.
    """
    by_input: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is functional.linear:
            by_input.setdefault(node.args[0], []).append(node)
    for source, nodes in by_input.items():
        if len(nodes) < 2 or any(argument.op != "placeholder" for node in nodes for argument in _parameters(node)):
            continue
        weights = [_parameters(node)[0] for node in nodes]
        biases = [[*_parameters(node), None][1] for node in nodes]
        with graph.graph.inserting_before(nodes[0]):
            joined = graph.graph.call_function(torch.ops.lightning_verl.projections, (source, weights, biases))
            for place, node in enumerate(nodes):
                node.replace_all_uses_with(graph.graph.call_function(_part, (joined, place)))
        for node in nodes:
            graph.graph.erase_node(node)
    graph.recompile()


def _parameters(node: torch.fx.Node) -> list[Any]:
    """Weight and, where there is one, bias of a linear layer."""
    given = [*node.args[1:], node.kwargs.get("bias")]
    return [argument for argument in given if argument is not None]


def _part(outputs: Sequence[Tensor], place: int) -> Tensor:
    return outputs[place]


_STREAMS: list[torch.cuda.Stream] = []
_MOST_ROWS = 512
"""With more, a single product fills a GPU."""


@torch.library.custom_op("lightning_verl::projections", mutates_args=())
def _projections(hidden: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Linear layers of one input, on a GPU in one launch or each but the first on a stream of its own."""
    if not hidden.is_cuda or hidden.numel() > _MOST_ROWS * hidden.shape[-1]:
        return [functional.linear(hidden, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    from lightning_verl.rollout.native.linears import joined_linear, pays

    if pays(hidden, weights, biases):
        return joined_linear(hidden, weights, biases)
    while len(_STREAMS) < len(weights) - 1:
        _STREAMS.append(torch.cuda.Stream())
    main = torch.cuda.current_stream()
    ready = main.record_event()
    outputs: list[Tensor] = []
    # What a stream's memory held before was read on the main stream before ``ready``, so it may be used again.
    for stream, weight, bias in zip(_STREAMS, weights[1:], biases[1:], strict=False):
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            outputs.append(functional.linear(hidden, weight, bias))
    outputs.insert(0, functional.linear(hidden, weights[0], biases[0]))
    for stream in _STREAMS[: len(weights) - 1]:
        main.wait_stream(stream)
    return outputs


@_projections.register_fake
def _(hidden: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [functional.linear(hidden, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
