"""Builds Megatron MoE layers under different dispatchers with the same weights, on CPU ranks, and compares them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mok_megatron import host

HIDDEN, INNER, EXPERTS = 32, 48, 8


def start(rank: int, tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1, etp: int = 1, seed: int = 7) -> None:
    """Host mode, Megatron's parallel groups and random-number states for this rank; again for other sizes."""
    host.enable()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    seed_everything(seed)


def seed_everything(seed: int = 7) -> None:
    """Megatron's random-number states, from the beginning, and torch's generator."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)


def config(dispatcher: str, **overrides: Any) -> Any:
    """A small TransformerConfig with experts, of the parallel sizes that `start` set up; `overrides` are its fields."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4, "ffn_hidden_size": 64}
    moe = {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": INNER, "moe_router_dtype": "fp32"}
    activation = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
    balancing = {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}
    other = {"bias_activation_fusion": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    tp = parallel_state.get_tensor_model_parallel_world_size()
    parallel = {
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": 1,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    fields: dict[str, Any] = {**sizes, **moe, **activation, **balancing, **other, **parallel, **overrides}
    return TransformerConfig(moe_token_dispatcher_type=dispatcher, **fields)


def layer(config: Any, seed: int = 7) -> Any:
    """Megatron's MoE layer for a config, by its own spec, with initial weights drawn from `seed`."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    seed_everything(seed)
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    built = spec(config=config)
    built.set_layer_number(1)
    return built


def expert_weights(experts: Any, attribute: str = "data") -> tuple[Tensor, Tensor]:
    """[E_local, 2I, H] and [E_local, H, I] of MokExperts or SequentialMLP; of their `grad` or `main_grad` likewise."""
    if hasattr(experts, "weight1"):
        return getattr(experts.weight1, attribute), getattr(experts.weight2, attribute)

    def stacked(linear: str) -> Tensor:
        weights = [getattr(expert, linear).weight for expert in experts.local_experts]
        values = [getattr(weight, attribute) for weight in weights]
        # An expert without tokens has no gradient.
        return torch.stack([torch.zeros_like(w) if v is None else v for w, v in zip(weights, values, strict=True)])

    return stacked("linear_fc1"), stacked("linear_fc2")


def copy_weights(source: Any, target: Any) -> None:
    """Give the MoE layer `target` (any dispatcher) the weights of `source`."""
    with torch.no_grad():
        for mine, theirs in zip(expert_weights(target.experts), expert_weights(source.experts), strict=True):
            if hasattr(target.experts, "weight1"):
                mine.copy_(theirs)
        for name, parameter in target.named_parameters():
            if not name.startswith("experts."):
                parameter.copy_(source.get_parameter(name))


def step(built: Any, tokens: Tensor, dy: Tensor, padding_mask: Tensor | None = None) -> dict[str, Tensor]:
    """One forward and backward; everything that a dispatcher could get wrong, by name."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    get_moe_metrics_tracker().clear()
    seed_everything()  # the router may draw
    built.zero_grad(set_to_none=True)
    x = tokens.clone().requires_grad_()
    y, _ = built(x, padding_mask=padding_mask)
    y.backward(dy)
    results = {"output": y.detach(), "input gradient": x.grad}
    for name, gradient in zip(("FC1", "FC2"), expert_weights(built.experts, "grad"), strict=True):
        results[f"{name} gradient"] = gradient
    for name, parameter in built.named_parameters():
        if not name.startswith("experts."):
            results[f"gradient of {name}"] = parameter.grad
    for name, metric in get_moe_metrics_tracker().metrics.items():
        results[f"recorded {name}"] = metric.values.clone()
    if built.router.enable_expert_bias:
        results |= _update_expert_bias(built)
    return {name: value.clone() for name, value in results.items()}


def _update_expert_bias(built: Any) -> dict[str, Tensor]:
    """What finalize_model_grads does with the token counts of the step."""
    from megatron.core import parallel_state
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

    counts = built.router.local_tokens_per_expert.clone()
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    _update_router_expert_bias([built], built.config, tp_dp_cp_group=group)
    return {"tokens per expert": counts, "expert bias": built.router.expert_bias}


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each tensor, relative to the largest value in it."""
    assert ours.keys() == theirs.keys(), f"{ours.keys()} against {theirs.keys()}"
    result = {}
    for name, value in ours.items():
        assert value.shape == theirs[name].shape, f"{name}: {value.shape} against {theirs[name].shape}"
        largest = theirs[name].abs().max().item() if value.numel() else 0.0
        distance = (value.double() - theirs[name].double()).abs().max().item() if value.numel() else 0.0
        result[name] = distance / largest if largest else distance
    return result


@contextlib.contextmanager
def latent_projections() -> Iterator[None]:
    """Lets MoELayer build its latent projections without Transformer Engine, as plain linear layers.

    What Megatron needs of TELinear in `parallel_mode="duplicated"` is a weight and an (output, bias) pair.
    """
    from megatron.core.transformer.moe import moe_layer

    class Duplicated(torch.nn.Linear):
        def __init__(self, inputs: int, outputs: int, *, init_method: Any, **unused: Any) -> None:
            super().__init__(inputs, outputs, bias=False)
            init_method(self.weight)

        def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return super().forward(x), None

    before = moe_layer.HAVE_TE, moe_layer.TELinear
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Duplicated
    try:
        yield
    finally:
        moe_layer.HAVE_TE, moe_layer.TELinear = before
