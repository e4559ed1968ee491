"""MoELayer with dispatch, experts and combine as one operator."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.utils import get_pg_size
from torch import Tensor

from mok_megatron.megatron.dispatcher import MokTokenDispatcher
from mok_megatron.megatron.experts import MokExperts
from mok_megatron.megatron.fp8 import is_bf16_layer
from mok_megatron.megatron.metrics import LayerRecord, logs_layers
from mok_megatron.ops import SharedExpert


class MokMoELayer(MoELayer):
    """Megatron's MoELayer (router, losses, recompute, latent projections unchanged) around `mok_moe`.

    The shared expert joins the operator where it is a plain SwiGLU whose weights are whole on every rank; elsewhere
    (`_fuses_shared_expert`) Megatron's own module computes it and the results are added.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        pg_collection = pg_collection or get_default_pg_collection()
        submodules = dataclasses.replace(submodules, experts=MokExperts)
        with _known_dispatcher(config):
            super().__init__(config, submodules, layer_number, pg_collection, is_mtp_layer, name)
        self.token_dispatcher = MokTokenDispatcher(config, pg_collection)
        self._is_mtp_layer = is_mtp_layer
        self.fuse_shared_expert = self._fuses_shared_expert()
        self._shared: SharedExpert | None = None
        self._record: LayerRecord | None = None

    def _fuses_shared_expert(self) -> bool:
        config = self.config
        graphs = set() if config.cuda_graph_impl == "none" else {module.name for module in config.cuda_graph_modules}
        return (
            type(self.shared_experts) is SharedExpertMLP
            and get_pg_size(self.tp_group) == config.gtp_weight_remat_size == 1
            and not config.moe_latent_size
            and config.moe_shared_expert_glu_interleave_size is None
            # A recomputed shared expert keeps no activations; the operator keeps gate and up.
            and not self.shared_experts_recompute
            # Megatron captures the shared expert in the router's graph and expects its output there.
            and "moe_router" not in graphs
        )

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """The shared expert's output [S, B, H], or None where it is part of the operator."""
        if not self.fuse_shared_expert:
            return super().shared_experts_compute(hidden_states)
        self._shared = shared_expert_operands(self.shared_experts, hidden_states)
        return None

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Args: hidden_states [T, H], probs [T, K]. Returns [T, H], combined already."""
        shared, self._shared = self._shared, None
        bf16 = is_bf16_layer(self.config, self.layer_number, self._is_mtp_layer)
        if self._record is None and logs_layers():
            number = self.layer_number + (self.config.num_layers if self._is_mtp_layer else 0)
            self._record = LayerRecord(number, self.experts.ep_group)
        return self.experts(hidden_states, self.token_dispatcher.topk_ids, probs, shared, bf16, self._record), None


def shared_expert_operands(module: SharedExpertMLP, hidden_states: Tensor) -> SharedExpert:
    """The operator's view of Megatron's shared expert, gate included.

    Args:
        module: the shared expert, not split by tensor parallelism.
        hidden_states: [S, B, H].
    """
    for linear in (module, module.linear_fc1, module.linear_fc2):
        _before_forward(linear)
    scale = None
    if module.use_shared_expert_gate:
        logits = torch.nn.functional.linear(hidden_states, module.gate_weight)
        scale = torch.sigmoid(logits).float().reshape(-1)
    return SharedExpert(module.linear_fc1.weight, module.linear_fc2.weight, scale)


def _before_forward(module: torch.nn.Module) -> None:
    """Run a module's forward pre-hooks although its forward is not called.

    DistributedDataParallel waits in such a hook for the all-gather of the module's parameters
    (--overlap-param-gather); the operator reads those parameters directly.
    """
    for number, hook in list(module._forward_pre_hooks.items()):
        if number in module._forward_pre_hooks_with_kwargs:
            hook(module, (), {})
        else:
            hook(module, ())


@contextlib.contextmanager
def _known_dispatcher(config: Any) -> Iterator[None]:
    """MoELayer's constructor knows three dispatchers by name; it makes the lightest one, which is then replaced."""
    asked_for = config.moe_token_dispatcher_type
    config.moe_token_dispatcher_type = "allgather"
    try:
        yield
    finally:
        config.moe_token_dispatcher_type = asked_for
