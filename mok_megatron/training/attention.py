"""Multi-head latent attention without Transformer Engine.

``MLASelfAttention`` tells its core attention how wide the query and value heads are; the core attention that Megatron
Core 0.19.2 uses where there is no Transformer Engine, ``DotProductAttention``, computes such heads correctly but its
constructor does not take the two arguments (NVIDIA/Megatron-LM issue 1589).
"""

import functools
import inspect
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention


def accept_mla_channels() -> None:
    """Let ``DotProductAttention`` be built with ``k_channels`` and ``v_channels``. Idempotent.

    Does nothing where Megatron's constructor takes them itself. Other uses of the class do not change.
    """
    original = DotProductAttention.__init__
    if "k_channels" in inspect.signature(original, follow_wrapped=False).parameters:
        return

    @functools.wraps(original)
    def __init__(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        original(self, *args, **kwargs)
        if k_channels is not None and kwargs.get("softmax_scale") is None:
            self.softmax_scale *= (self.config.kv_channels / k_channels) ** 0.5
        if v_channels is not None:
            # The width of the output, which the constructor takes from kv_channels.
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = __init__
