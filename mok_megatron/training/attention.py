"""Attention for MLA without Transformer Engine.

Megatron Core 0.19.2's own ``DotProductAttention`` cannot be built by ``MLASelfAttention`` (it takes no ``k_channels``
and ``v_channels``: NVIDIA/Megatron-LM issue 1589). This module stands in for it in the block spec.
"""

import math
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig


class CausalAttention(MegatronModule):
    """Causal attention whose value heads may be narrower than its query heads, by torch's own kernel.

    Args:
        config: Megatron's configuration.
        attn_mask_type: only ``AttnMaskType.causal``.
        k_channels: query and key size of a head, by default ``config.kv_channels``.
        v_channels: value size of a head, by default ``k_channels``.
        softmax_scale: by default ``1 / sqrt(k_channels)``.

    Raises:
        ValueError: another mask, or attention dropout.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        *,
        attn_mask_type: AttnMaskType,
        k_channels: int | None = None,
        v_channels: int | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal or config.attention_dropout:
            raise ValueError("CausalAttention takes AttnMaskType.causal and attention_dropout=0 only")
        k_channels = k_channels or config.kv_channels
        self._scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(k_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query, key: [sequence, batch, heads, k_channels].
            value: [sequence, batch, heads, v_channels].
            attention_mask: ignored, as the mask is causal.
            packed_seq_params: None; packed sequences need Transformer Engine.

        Returns:
            [sequence, batch, heads * v_channels].
        """
        if packed_seq_params is not None:
            raise ValueError("packed sequences need Transformer Engine's attention")
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self._scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def decoder_spec_without_te(config: MLATransformerConfig) -> TransformerBlockSubmodules:
    """Megatron's own decoder block spec for Transformer-Engine-free training, with MLA's core attention replaced."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if config.multi_latent_attention:
            attention.core_attention = CausalAttention
    return block
