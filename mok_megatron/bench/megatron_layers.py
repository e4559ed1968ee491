"""Megatron Core's own MoE layer under its dispatchers, with the benchmark's weights and routing.

On GPUs with Transformer Engine's grouped products and weight gradients accumulated into fp32 `main_grad`; without
a GPU with Megatron's local experts, in CPU host mode. The router is replaced by the benchmark's fixed routing, so
that every implementation is measured from the routing on.
"""

import contextlib
import importlib.util
import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mok_megatron.bench.layers import Unavailable, clear, gradient_of
from mok_megatron.bench.problem import Problem


class FixedRouting(torch.nn.Module):
    """Stands where Megatron's router does, and gives what it gives: probs [T, E] fp32 and map [T, E] bool."""

    def __init__(self, topk_ids: Tensor, experts: int):
        super().__init__()
        self.topk_ids = topk_ids
        self.routing_map = torch.zeros(topk_ids.shape[0], experts, dtype=torch.bool, device=topk_ids.device)
        self.routing_map.scatter_(1, topk_ids, True)
        self.topk_weights: Tensor | None = None

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert self.topk_weights is not None
        empty = torch.zeros(self.routing_map.shape, dtype=self.topk_weights.dtype, device=hidden.device)
        return empty.scatter(1, self.topk_ids, self.topk_weights), self.routing_map


class MegatronLayer:
    """One of Megatron's dispatchers.

    Args:
        problem, group: as for every implementation.
        dispatcher: "alltoall", or "hybridep" or "deepep" (backends of Megatron's flex dispatcher).
        recipe: "blockwise" or "mxfp8": Transformer Engine's FP8 with E4M3 throughout; None is the problem's dtype. Its
            layers, like ours, quantise weights at the first call only.
    """

    def __init__(
        self, problem: Problem, group: dist.ProcessGroup | None, dispatcher: str, recipe: str | None = None
    ) -> None:
        self.on_gpu = problem.x.is_cuda
        self.is_fp8 = recipe is not None
        _require_libraries(dispatcher, self.on_gpu, self.is_fp8)
        ranks = 1 if group is None else group.size()
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # of optional packages that Megatron would use
            if not self.on_gpu:
                from mok_megatron import host

                host.enable()
            _start_megatron(ranks)
            self.layer = _build(problem, dispatcher, self.on_gpu, recipe)
        self.routing = FixedRouting(problem.topk_ids, problem.shape.experts)
        self.layer.router = self.routing
        self.first, self.second = _expert_weights(self.layer.experts)
        _copy(self.first, problem.w1)
        _copy(self.second, problem.w2)
        if problem.shared is not None:
            shared = self.layer.shared_experts
            for weight, value in zip((shared.linear_fc1.weight, shared.linear_fc2.weight), problem.shared, strict=True):
                weight.data.copy_(value)
        if self.on_gpu:
            for weight in self.layer.parameters():
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
                weight.grad_added_to_main_grad = False

    def __call__(self, x: Tensor, topk_weights: Tensor) -> Tensor:
        self.routing.topk_weights = topk_weights
        from megatron.core.fp8_utils import get_fp8_context

        with get_fp8_context(self.layer.config):
            y, _ = self.layer(x.unsqueeze(1))  # [T, 1, H]: a sequence of T tokens, batch 1
        return y.squeeze(1)

    def weight_gradients(self) -> list[Tensor]:
        return [torch.stack([gradient_of(weight) for weight in weights]) for weights in (self.first, self.second)]

    def clear_gradients(self) -> None:
        for weight in self.layer.parameters():
            clear(weight)


def _require_libraries(dispatcher: str, on_gpu: bool, is_fp8: bool) -> None:
    if not on_gpu:
        if dispatcher != "alltoall" or is_fp8:
            raise Unavailable("needs GPUs")
        return
    if importlib.util.find_spec("transformer_engine") is None:
        raise Unavailable("Transformer Engine is not installed")
    if dispatcher != "alltoall":
        from megatron.core.transformer.moe import fused_a2a

        if not (fused_a2a.HAVE_HYBRIDEP if dispatcher == "hybridep" else fused_a2a.HAVE_DEEP_EP):
            what = "its HybridEPBuffer" if dispatcher == "hybridep" else "its Buffer"
            raise Unavailable(f"the package deep_ep with {what} is not importable")


def _start_megatron(ranks: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks, expert_tensor_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def _build(problem: Problem, dispatcher: str, on_gpu: bool, recipe: str | None) -> Any:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig

    shape, dtype = problem.shape, problem.x.dtype
    fields: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": shape.hidden,
        "num_attention_heads": 1,
        "ffn_hidden_size": shape.intermediate,
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.topk,
        "moe_ffn_hidden_size": shape.intermediate,
        "moe_shared_expert_intermediate_size": shape.shared or None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "moe_token_dispatcher_type": "alltoall" if dispatcher == "alltoall" else "flex",
        "expert_model_parallel_size": problem.shape.experts // problem.w1.shape[0],
        "bias_activation_fusion": on_gpu,
    }
    if on_gpu:
        fields |= {"moe_grouped_gemm": True, "moe_permute_fusion": True, "gradient_accumulation_fusion": True}
    if recipe is not None:
        fields |= {"fp8": "e4m3", "fp8_recipe": recipe}
    if dispatcher != "alltoall":
        fields["moe_flex_dispatcher_backend"] = dispatcher
    config = TransformerConfig(**fields)
    spec = get_moe_module_spec(use_te=on_gpu, num_experts=shape.experts, moe_grouped_gemm=on_gpu)
    layer = spec(config=config)
    layer.set_layer_number(1)
    return layer.to(device=problem.x.device, dtype=dtype)


def _expert_weights(experts: Any) -> tuple[list[Any], list[Any]]:
    """The parameters of both products, an expert after another, of TEGroupedMLP or SequentialMLP."""
    if hasattr(experts, "local_experts"):
        each = list(experts.local_experts)
        return [one.linear_fc1.weight for one in each], [one.linear_fc2.weight for one in each]
    count = experts.num_local_experts
    first, second = experts.linear_fc1, experts.linear_fc2
    return [getattr(first, f"weight{i}") for i in range(count)], [getattr(second, f"weight{i}") for i in range(count)]


def _copy(weights: list[Any], values: Tensor) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.data.copy_(value)
