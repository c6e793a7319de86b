"""Dense tensor parallelism from the plan data in transformers' configs.

The plans are stable data; transformers' own functions that apply them change from release to release and untie the
head. Linear layers are cut by ``parallel.linears``, embedding and output head along the vocabulary, by
``parallel.vocabulary``. Packed experts are not cut here but divided as wholes, by ``parallel.expert``.
"""

from __future__ import annotations

import copy
import re

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from lightning_verl.parallel.collectives import SumGradient
from lightning_verl.parallel.expert import expert_modules
from lightning_verl.parallel.linears import cut_linears, linears, sum_input_gradient
from lightning_verl.parallel.vocabulary import cut_vocabulary, vocabulary_ends

_CUT_STYLES = ("colwise", "rowwise")
_SUMMED_STYLE = "replicated_with_grad_allreduce"


def models_to_cut(module: nn.Module, tensor: int) -> list[PreTrainedModel]:
    """The transformers models inside a role that a tensor axis of this size cuts: the outermost ones, checked.

    Raises:
        ValueError: There is none, or one cannot be cut.
    """
    if tensor == 1:
        return []
    found: list[PreTrainedModel] = []
    for child in module.modules():
        if isinstance(child, PreTrainedModel) and not any(
            child is inner for model in found for inner in model.modules()
        ):
            check_tensor_parallel(child, tensor)
            found.append(child)
    if not found:
        raise ValueError(
            f"{type(module).__name__} holds no transformers model with a tensor-parallel plan, so tp={tensor} has "
            "nothing to cut; set its role's tp to 1."
        )
    return found


def check_tensor_parallel(model: PreTrainedModel, tensor: int) -> None:
    """Refuse a model that cannot be cut over ``tensor`` ranks, before anything is communicated.

    Raises:
        ValueError: The config has no plan, uses a style that is not dense, or a size does not divide.
    """
    for problem in tensor_parallel_problems(model, tensor):
        raise ValueError(problem)


def tensor_parallel_problems(model: PreTrainedModel, tensor: int) -> list[str]:
    """Every reason why a model cannot be cut over ``tensor`` ranks; none: it can."""
    config = model.config.get_text_config()
    name = type(model).__name__
    plan = _plan(model)
    if not plan:
        return [f"{name} has no tensor-parallel plan (config.base_model_tp_plan is empty); set its role's tp to 1."]
    unknown = sorted(set(plan.values()) - {*_CUT_STYLES, _SUMMED_STYLE} - {"embedding_rowwise"})
    if unknown:
        return [f"{name} plans tensor styles {unknown}, which are not supported yet; set its role's tp to 1."]
    sizes = {
        "num_key_value_heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
    }
    return [
        f"{name} has {key}={size}, which tp={tensor} does not divide; choose a tp that divides "
        f"{sizes['num_key_value_heads']} key-value heads."
        for key, size in sizes.items()
        if size % tensor
    ]


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut a model's matrices over a one-axis mesh, in place. Every rank must hold the same weights.

    Args:
        model: The model, with LoRA adapters or without.
        mesh: The role's tensor axis.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [getattr(end, "weight", None) for end in (embedding, head)]  # none on other stages of a pipeline
    tied = ends[0] is not None and ends[0] is ends[1]
    group, shared = mesh.get_group(), _modules_with_shared_input(model)
    for module, style in planned_styles(model):
        if style in _CUT_STYLES:
            cut_linears(module, style, mesh)
        elif style == _SUMMED_STYLE:
            _sum_weight_gradient(module, group)
    for module in shared:
        sum_input_gradient(module, group)
    cut_vocabulary(model, mesh)
    if tied and head.weight is not embedding.weight:
        raise RuntimeError(f"{type(model).__name__}: tensor parallelism untied the output head from the embedding")


def planned_styles(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """The modules that a model's tensor-parallel plan names, each with its style."""
    plan = _plan(model)
    found = []
    for name, module in model.base_model.named_modules():
        style = plan.get(_pattern(name))
        if style is not None:
            found.append((module, style))
    return found


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """The model's plan without its entries for packed experts."""
    plan = dict(getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {})
    found = expert_modules(model)
    packed = {_pattern(name) for name, module in model.base_model.named_modules() if module in found}
    return {name: style for name, style in plan.items() if not {name, name.rpartition(".")[0]} & packed}


def _pattern(name: str) -> str:
    """A module's name as plans write it: ``*`` for a layer's number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def cut_dims(model: PreTrainedModel) -> dict[nn.Parameter, int]:
    """Which parameters ``apply_tensor_parallel`` cuts, and along which dim; the others stay whole."""
    dims: dict[nn.Parameter, int] = {}
    for module, style in planned_styles(model):
        for linear in linears(module, style) if style in _CUT_STYLES else ():
            dims[linear.weight] = 0 if style == "colwise" else 1
            if linear.bias is not None and style == "colwise":
                dims[linear.bias] = 0
    for end in vocabulary_ends(model):
        dims.update(dict.fromkeys(end.parameters(recurse=False), 0))
    return dims


def _modules_with_shared_input(model: PreTrainedModel) -> list[nn.Module]:
    """Where gradients of what linear layers cut by columns read are summed, each once.

    It is the module around them (attention, an MLP), if the plan names all that has parameters in it. Otherwise
    something whole, such as a router, may read the same: then it is each of these layers.
    """
    planned = planned_styles(model)
    named = {parameter for module, _ in planned for parameter in module.parameters()}
    around = {child: parent for parent in model.base_model.modules() for child in parent.children()}
    found: dict[nn.Module, None] = {}
    for module, style in planned:
        if style == "colwise":
            parent = around[module]
            found[parent if named.issuperset(parent.parameters()) else module] = None
    return list(found)


def _sum_weight_gradient(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Keep a weight whole whose input is this rank's heads only: its gradient is the sum over the tensor axis."""
    plain = copy.copy(module)
    plain._parameters = dict(module._parameters)

    def forward(hidden: Tensor) -> Tensor:
        weight = SumGradient.apply(module.weight, group)  # type: ignore[no-untyped-call]
        return torch.func.functional_call(plain, {"weight": weight}, (hidden,))  # type: ignore[no-any-return]

    module.forward = forward
