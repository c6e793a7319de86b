"""Tensor parallelism: what is cut, what stays tied, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_verl.parallel.structure import decoder_layers
from lightning_verl.parallel.tensor import apply_tensor_parallel, check_tensor_parallel, models_to_cut
from lightning_verl.testing import run_ranks, tiny_model

IDS = torch.arange(3, 35).view(2, 16)


def cut_facts(family: Any) -> dict[str, Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("actor_tensor",))
    model, alone = tiny_model(family), tiny_model(family)
    apply_tensor_parallel(model, mesh)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        difference = (model(input_ids=IDS).logits - alone(input_ids=IDS).logits).abs().max().item()
        tokens = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        expected = alone.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return {
        "local": tuple(attention.q_proj.weight.to_local().shape),
        "tokens": [len(end.weight.to_local()) for end in (model.get_input_embeddings(), model.lm_head)],
        "tied": model.lm_head.weight is model.get_input_embeddings().weight,
        "difference": difference,
        "same_tokens": torch.equal(tokens, expected),
        "names": sorted(dict(model.named_parameters())) == sorted(dict(alone.named_parameters())),
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_cut_model_computes_the_same_and_stays_tied(family: str) -> None:
    for facts in run_ranks(cut_facts, 2, family):
        assert facts["local"] == (32, 64)  # half of the 64 rows
        assert facts["tokens"] == [64, 64]  # half of the 128 tokens
        assert facts["tied"] == (family == "qwen2")
        assert facts["difference"] < 1e-5
        assert facts["same_tokens"]
        assert facts["names"]


def test_models_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="has num_key_value_heads=2, which tp=4 does not divide"):
        check_tensor_parallel(tiny_model("qwen3"), 4)
    with pytest.raises(ValueError, match="has intermediate_size=129, which tp=2 does not divide"):
        check_tensor_parallel(tiny_model("qwen3", intermediate_size=129), 2)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no tensor-parallel plan"):
        check_tensor_parallel(tiny_model("gpt2"), 2)
    with pytest.raises(ValueError, match="Linear holds no transformers model .* tp=2 has nothing to cut"):
        models_to_cut(torch.nn.Linear(1, 1), 2)


def test_other_styles_than_the_dense_ones_are_refused_beside_packed_experts() -> None:
    model = tiny_model("qwen3_moe")
    check_tensor_parallel(model, 2)  # its packed experts, planned as "packed_colwise" and so on, are divided elsewhere
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, "layers.*.mlp.gate": "ep_router"}
    with pytest.raises(ValueError, match=r"plans tensor styles \['ep_router'\], which are not supported yet"):
        check_tensor_parallel(model, 2)


def test_the_decoder_layers_of_a_model_are_found() -> None:
    for family in ("llama", "gpt2"):
        model = tiny_model(family)  # type: ignore[arg-type]
        expected = model.model.layers if family == "llama" else model.transformer.h
        assert decoder_layers(model) == list(expected)
    plain = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in range(3)])})
    assert decoder_layers(plain) == list(plain["layers"])
    assert decoder_layers(torch.nn.Linear(1, 1)) == []
