"""Where the decoder layers of a transformers module are."""

from __future__ import annotations

from torch import nn


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model, outermost first.

    They are the modules of the classes that transformers must keep on one device (``_no_split_modules``). A module that
    names none gives its longest ``nn.ModuleList`` of at least two equal classes, or nothing.
    """
    names: set[str] = set()
    for child in module.modules():
        names.update(getattr(child, "_no_split_modules", None) or ())
    layers = [child for child in module.modules() if type(child).__name__ in names]
    if layers:
        return layers
    lists = [
        list(child)
        for child in module.modules()
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(layer) for layer in child}) == 1
    ]
    return max(lists, key=len, default=[])
