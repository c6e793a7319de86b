"""When the native engine keeps captured graphs beyond a rollout; tests/cuda runs them."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_verl.rollout.native import NativeEngine, NativeOptions
from lightning_verl.rollout.native.engine import Held
from lightning_verl.testing import tiny_model


class Graphs:
    """Stands for what decodes on a GPU."""

    let_go_of = 0

    def let_go(self) -> None:
        self.let_go_of += 1


@pytest.mark.parametrize(("stay", "ranks", "kept"), [(True, 1, True), (False, 1, False), (True, 2, False)])
@pytest.mark.parametrize("keep", [False, True])
def test_graphs_stay_where_weights_do_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, keep: bool, stay: bool, ranks: int, kept: bool
) -> None:
    options = NativeOptions(keep_kvcache=keep)
    engine = NativeEngine(tiny_model("llama"), pad_token_id=0, eos_token_ids=[2], options=options)
    graphs = Graphs()
    engine._runner, engine._stay, engine.tensor_group = graphs, stay, object()  # type: ignore[assignment]
    monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
    engine.release()
    assert (engine._runner is graphs) is kept
    assert graphs.let_go_of == (not keep)


def test_what_graphs_hold_changes_with_weights_and_adapters_that_move() -> None:
    model: Any = tiny_model("llama")
    found = [Held.of(model)]
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert Held.of(model) == found[0], "numbers may change"
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    found.append(Held.of(model))
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    found.append(Held.of(model))
    plain = found[-1].adapters
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    found.append(Held.of(model))
    with adapted.disable_adapter():
        found.append(Held.of(model))
    for layer in (module for module in model.modules() if hasattr(module, "set_scale")):
        layer.set_scale("default", 3.0)
    found.append(Held.of(model))
    adapted.merge_adapter()
    found.append(Held.of(model))
    for place, one in enumerate(found):
        assert one not in found[:place]
    assert plain == []
    assert len({str(one.adapters) for one in found[3:]}) == 4
