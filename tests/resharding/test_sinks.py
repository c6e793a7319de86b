"""The skeleton that rolls out: it takes weights in and lets their memory go. Whole rollouts: test_engine.py."""

from __future__ import annotations

import torch

from lightning_verl.resharding.sinks import RolloutModule
from lightning_verl.testing import tiny_model


def test_weights_come_and_their_memory_goes() -> None:
    view = RolloutModule(tiny_model("qwen2"))
    for turn, dtype in ((0.0, torch.float32), (1.0, torch.bfloat16)):
        tensors = {name: torch.full(shape, turn, dtype=dtype) for name, shape in view.shapes.items()}
        view.fill(tensors)
        parameters = dict(view.module.named_parameters())
        assert {name: parameter.data_ptr() for name, parameter in parameters.items()} == {
            name: tensor.data_ptr() for name, tensor in tensors.items()
        }
        assert {name: tuple(parameter.shape) for name, parameter in parameters.items()} == view.shapes
        assert all(parameter.unique().tolist() == [turn] for parameter in parameters.values())
        assert {(parameter.dtype, parameter.requires_grad) for parameter in parameters.values()} == {(dtype, False)}
        assert view.module.get_output_embeddings().weight is view.module.get_input_embeddings().weight
        view.drop()
        assert {parameter.device.type for parameter in view.module.parameters()} == {"meta"}
        assert {parameter.untyped_storage().nbytes() for parameter in parameters.values()} == {0}
