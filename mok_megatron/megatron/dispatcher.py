"""The token dispatcher that dispatches nothing: the kernel moves the tokens. It only translates routes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor


class MokTokenDispatcher(MoETokenDispatcher):
    """Turns the router's dense map into routes, and shapes tokens for the operator.

    Between `dispatch_preprocess` and `combine_postprocess`, hidden states are [T, H] tokens of this rank and probs
    are [T, K] router weights; `topk_ids` holds the experts of the same routes.
    """

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.hidden_shape: torch.Size | None = None
        self.topk_ids: Tensor | None = None
        # What a CUDA graph of the router and preprocessing (moe_router, moe_preprocess) hands on beside probs.
        self.cudagraph_attrs = ["topk_ids"]

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Args: tokens [S, B, H], routing_map and probs [S * B, E] of the router. Returns [S * B, H] and [S * B, K]."""
        self.hidden_shape = tokens.shape
        config = self.config
        drops = config.moe_expert_capacity_factor is not None
        pads = drops and config.moe_pad_expert_input_to_capacity
        self.topk_ids, weights = routes_from_map(routing_map, probs, config.moe_router_topk, drops, pads)
        return tokens.reshape(-1, tokens.shape[-1]), weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing to do: the kernel pulls the tokens."""
        return hidden_states, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Nothing to do."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Nothing to do: the kernel pushed the results back and added them up."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[S * B, H] back to the layer's [S, B, H]."""
        assert self.hidden_shape is not None
        return hidden_states.view(self.hidden_shape)


def routes_from_map(
    routing_map: Tensor, probs: Tensor, topk: int, drops: bool = True, pads: bool = False
) -> tuple[Tensor, Tensor]:
    """Routes of each token, in the order of expert numbers, -1 where the router dropped one.

    Few operations, because the host enqueues them before every MoE layer: three where every token keeps K routes.

    Args:
        routing_map: [T, E] bool, at most `topk` true per row (more only where Megatron pads experts to their
            capacity, and those have probability 0).
        probs: [T, E] router probabilities; gradients flow back through the result.
        topk: K.
        drops: rows may have fewer than K routes.
        pads: rows may have more than K routes, of which the K most probable are meant.

    Returns:
        topk_ids [T, K] int32 and topk_weights [T, K] fp32, 0 where there is no route.
    """
    experts = routing_map.shape[1]
    with torch.no_grad():
        if pads:
            # Chosen experts rank by probability in [0, 1], the others below them.
            best = torch.where(routing_map, probs.detach().float(), -1.0).topk(topk, dim=1).indices
            routing_map = routing_map & torch.zeros_like(routing_map).scatter(1, best, True)
        numbers, nobody = _expert_numbers(experts, routing_map.device)
        # The numbers of the chosen experts are the smallest of their row; those of the others are all E.
        chosen = torch.where(routing_map, numbers, nobody).topk(topk, dim=1, largest=False, sorted=True)
    weights = probs.gather(1, chosen.indices).float()
    if not (drops or pads):
        return chosen.values, weights
    missing = chosen.values == experts
    return chosen.values.masked_fill(missing, -1), weights.masked_fill(missing, 0.0)


@functools.cache
def _expert_numbers(experts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """0 .. E - 1, and E alone, in int32."""
    with torch.inference_mode(False):
        numbers = torch.arange(experts + 1, dtype=torch.int32, device=device)
    return numbers[:experts], numbers[experts:]
