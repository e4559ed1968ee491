"""The expert weights as Megatron parameters, and their place in a distributed checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor
from torch.nn import Parameter

from mok_megatron.errors import MokConfigError, Problems
from mok_megatron.formats import CACHE
from mok_megatron.megakernel import check_errors
from mok_megatron.megatron.validate import mok_config
from mok_megatron.ops import SharedExpert, mok_moe
from mok_megatron.ops.backend import Observer


class MokExperts(MegatronModule):
    """The local experts: one parameter a projection.

    weight1: [E_local, 2I, H] gate rows, then up rows; weight2: [E_local, H, I]. H is `moe_latent_size` where that is
    set. Initial values are those that SequentialMLP (or, with --moe-grouped-gemm, TEGroupedMLP) draws from the same
    seed.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None, name: str | None = None) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.ep_group = pg_collection.ep
        self.dp_group = pg_collection.expt_dp
        self.mok = mok_config(config)
        # Megatron sets it again at the first microbatch of each step, as in Transformer Engine's layers.
        self.is_first_microbatch = True
        hidden, inner = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size
        self.weight1 = self._new_parameter(num_local_experts, 2 * inner, hidden, partition_dim=1, stride=2)
        self.weight2 = self._new_parameter(num_local_experts, hidden, inner, partition_dim=2)
        if config.perform_initialization:
            self._initialize()
        self.register_load_state_dict_pre_hook(_refuse_fp8_weights)
        self.register_load_state_dict_pre_hook(_drop_extra_states)
        self.register_state_dict_pre_hook(_before_saving)

    def forward(
        self,
        tokens: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        shared: SharedExpert | None = None,
        bf16: bool = False,
        observer: Observer | None = None,
    ) -> Tensor:
        """The whole layer after routing, peers' tokens included; shapes as in `mok_moe`. `bf16`: not in FP8.

        Weight gradients are added to `main_grad` wherever DistributedDataParallel has set it, with and without
        --no-gradient-accumulation-fusion: that flag is about the kernel of Apex that Megatron's own linear layers
        need for it, and the wrapper honours `grad_added_to_main_grad` either way.
        """
        if self.is_first_microbatch:
            for weight in (self.weight1, self.weight2):
                CACHE.forget(weight)
            self.is_first_microbatch = False
        return mok_moe(
            tokens,
            topk_ids,
            topk_weights,
            self.weight1,
            self.weight2,
            group=self.ep_group if get_pg_size(self.ep_group) > 1 else None,
            config=dataclasses.replace(self.mok, format="bf16") if bf16 else self.mok,
            shared=shared,
            observer=observer,
        )

    def backward_dw(self) -> None:
        """Nothing is delayed: the backward of `forward` computes the weight gradients too."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, ShardedTensorFactory | ShardedObject]:
        """Keys and layout of SequentialMLP and TEGroupedMLP: one entry an expert, gate and up apart.

        A factory a parameter (not a tensor an expert), so that optimizers can map their states the same way. Beside
        each weight stands an empty `_extra_state`: Megatron's linear layers write one, Transformer Engine's keep FP8
        scales there, and both refuse to load a checkpoint that has none.

        Raises:
            MokError: a launch failed.
        """
        _before_saving()
        singleton = (metadata or {}).get("singleton_local_shards", False)
        first = get_pg_rank(self.ep_group) * self.num_local_experts
        total = get_pg_size(self.ep_group) * self.num_local_experts
        layout = _CheckpointLayout(tuple(sharded_offsets), first, total, singleton)
        replica = (0, 0, get_pg_rank(self.dp_group))
        entries: dict[str, ShardedTensorFactory | ShardedObject] = {}
        for name, linear, parts in (("weight1", "linear_fc1", 2), ("weight2", "linear_fc2", 1)):
            key = f"{prefix}experts.{linear}"
            entries[f"{prefix}{name}"] = layout.factory(f"{key}.weight", getattr(self, name), parts, replica)
            for expert in range(self.num_local_experts):
                entries[f"{prefix}{linear}.{expert}.{EXTRA_STATE}"] = layout.extra_state(
                    f"{key}.{EXTRA_STATE}", first + expert, replica
                )
        return entries

    def _new_parameter(self, *shape: int, partition_dim: int, stride: int = 1) -> Parameter:
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=device))
        # Every rank of the tensor parallel group holds other experts, so norms must count all of them ...
        set_tensor_model_parallel_attributes(parameter, True, partition_dim, stride)
        # ... and gradients are reduced over expert data parallel ranks: not those of the dense weights as soon as
        # experts are spread over other ranks, or tensor parallel ranks each bring tokens of their own.
        own_groups = get_pg_size(self.ep_group) > 1 or self.config.tensor_model_parallel_size > 1
        parameter.allreduce = not own_groups  # type: ignore[attr-defined]
        return parameter

    def _initialize(self) -> None:
        weights = [(w, e) for e in range(self.num_local_experts) for w in (self.weight1, self.weight2)]
        if self.config.moe_grouped_gemm:
            weights.sort(key=lambda entry: entry[0] is self.weight2)
        for weight, expert in weights:
            method = self.config.init_method if weight is self.weight1 else self.config.output_layer_init_method
            if self.config.use_cpu_initialization:
                # Megatron draws in fp32 from the default generator here, and rounds afterwards.
                drawn = torch.empty(weight.shape[1:], dtype=torch.float)
                method(drawn)
                weight.data[expert].copy_(drawn)
            else:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    method(weight.data[expert])


EXTRA_STATE = "_extra_state"
"""Last part of the keys under which linear layers keep what is not a parameter."""


def _refuse_fp8_weights(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Before a load: FP8 values mean nothing without their scales, and torch would convert them without a word."""
    problems = Problems()
    for name in ("weight1", "weight2"):
        value = state_dict.get(f"{prefix}{name}")
        problems.require(
            not isinstance(value, Tensor) or value.dtype.itemsize > 1,
            f"{prefix}{name} is {getattr(value, 'dtype', None)}",
            "store it dequantised, in bf16 or fp32, as Megatron's distributed checkpoints do",
        )
    problems.raise_if_any(MokConfigError, "The checkpoint's experts have FP8 parameters, of a recipe unknown here:")


def _drop_extra_states(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Before a load: the fused layer has no use for what other linear layers left in the checkpoint."""
    for key in [key for key in state_dict if key.startswith(prefix) and key.endswith(EXTRA_STATE)]:
        del state_dict[key]


def _before_saving(*unused: Any) -> None:
    """Weights may have been updated from a launch that failed: its error comes before a checkpoint of them."""
    check_errors(wait=True)


class _CheckpointLayout:
    """Where the experts of this rank stand among all of them."""

    def __init__(self, sharded_offsets: tuple, first: int, total: int, singleton: bool) -> None:
        self.sharded_offsets, self.first, self.total, self.singleton = sharded_offsets, first, total, singleton

    def factory(self, key: str, weight: Tensor, parts: int, replica: tuple[int, int, int]) -> ShardedTensorFactory:
        """`weight` [E_local, parts * n, m] as one sharded tensor an expert and part."""

        # The key comes back as an argument, because optimizers put their own prefix before it.
        @torch.no_grad()
        def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
            assert flattened_range is None, "flattened optimizer states are a format that Megatron no longer writes"
            return [
                self._piece(key, piece, self.first + expert, part, parts, replica_id)
                for expert in range(tensor.shape[0])
                for part, piece in enumerate(tensor[expert].chunk(parts, dim=0))
            ]

        @torch.no_grad()
        def merge(pieces: list[Tensor]) -> Tensor:
            # Pieces are views of one allocation when they were loaded in place; cat copies them either way.
            return torch.cat(pieces).view(weight.shape)

        return ShardedTensorFactory(key, weight, build, merge, replica)

    def extra_state(self, key: str, expert: int, replica: tuple[int, int, int]) -> ShardedObject:
        """The empty tensor that Transformer Engine takes for "no FP8 state"."""
        empty = torch.empty(0, dtype=torch.uint8)
        return make_sharded_object_for_checkpoint(empty, self._key(key, expert), self._offsets(expert), replica)

    def _piece(self, key: str, piece: Tensor, expert: int, part: int, parts: int, replica_id: Any) -> ShardedTensor:
        offsets = self._offsets(expert)
        key = self._key(key, expert)
        split: tuple = ()
        if parts > 1 and self.singleton:
            key += "_" + "wv"[part]
        elif parts > 1:
            split = ((len(offsets), part, parts),)
        return ShardedTensor.from_rank_offsets(
            key, piece, *offsets, *split, replica_id=replica_id, prepend_axis_num=len(offsets)
        )

    def _offsets(self, expert: int) -> tuple:
        """Axes before the weight's own: those of the caller and, unless each expert has a key, the experts."""
        if self.singleton:
            return self.sharded_offsets
        return (*self.sharded_offsets, (len(self.sharded_offsets), expert, self.total))

    def _key(self, key: str, expert: int) -> str:
        if not self.singleton:
            return key
        head, _, tail = key.rpartition(".linear_")
        return f"{head}.{expert}.linear_{tail}"
