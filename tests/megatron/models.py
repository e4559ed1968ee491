"""A small GPTModel in training through Megatron's own schedules, DDP, optimizer and distributed checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.megatron import layers

VOCABULARY, SEQUENCE, BATCH = 64, 16, 2
FIELDS: dict[str, Any] = {
    "num_layers": 2,
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


class Run:
    """One model in training. Every method is collective; parallel groups are those of `layers.start`.

    Args:
        dispatcher: `moe_token_dispatcher_type`.
        ddp: fields of DistributedDataParallelConfig.
        seed: of the initial weights.
        fields: of the TransformerConfig.
    """

    def __init__(
        self,
        dispatcher: str,
        ddp: dict[str, Any] | None = None,
        seed: int = 7,
        **fields: Any,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.config = layers.config(dispatcher, finalize_model_grads_func=finalize_model_grads, **{**FIELDS, **fields})
        layers.seed_everything(seed)
        spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False)
        if self.config.sequence_parallel:
            spec.layer_norm = _norm
            for each in spec.layer_specs:
                each.submodules.input_layernorm = each.submodules.pre_mlp_layernorm = _norm
        self.model = GPTModel(
            self.config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        options = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **(ddp or {})}
        # Small buckets, so that overlapped communication has several to overlap.
        self.ddp = DistributedDataParallel(
            self.config, DistributedDataParallelConfig(bucket_size=3000, **options), self.model
        )
        self.distributed_optimizer = options["use_distributed_optimizer"]
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=1.0,
            params_dtype=torch.float32,
            use_distributed_optimizer=self.distributed_optimizer,
            overlap_param_gather=options.get("overlap_param_gather", False),
        )
        self.optimizer = get_megatron_optimizer(optimizer, [self.ddp])
        self.config.grad_scale_func = self.optimizer.scale_loss
        if options.get("overlap_grad_reduce"):
            self.config.no_sync_func = self.ddp.no_sync

    def step(self, number: int, microbatches: int = 2) -> dict[str, float]:
        """One optimizer step on tokens that depend on the step, the microbatch and the data-parallel rank."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * number + parallel_state.get_data_parallel_rank())
        shape = (microbatches, BATCH, SEQUENCE + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter(tokens),
            model=[self.ddp],
            num_microbatches=microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        updated, norm, _ = self.optimizer.step()
        assert updated
        loss = sum(report["loss"] for report in reports)
        return {"loss": float(loss), "gradient norm": float(norm)}

    def weights(self) -> dict[str, Tensor]:
        """Every parameter and expert bias by name; of experts [E, ...], those of the other ranks included."""
        from megatron.core import parallel_state

        if hasattr(self.ddp, "remove_forward_pre_hook_handles") and self.ddp.remove_forward_pre_hook_handles:
            self.ddp.disable_forward_pre_hook()  # waits for the gather of the last step's parameters
            self.ddp.enable_forward_pre_hook()
        found = {name: p.detach().clone() for name, p in self.model.named_parameters() if ".experts." not in name}
        found |= {name: b.clone() for name, b in self.model.named_buffers() if name.endswith("expert_bias")}
        group = parallel_state.get_expert_model_parallel_group()
        for name, module in self.model.named_modules():
            if name.endswith(".experts"):
                for part, weight in zip(("FC1", "FC2"), layers.expert_weights(module), strict=True):
                    gathered = [torch.empty_like(weight) for _ in range(group.size())]
                    dist.all_gather(gathered, weight.contiguous(), group=group)
                    found[f"{name}.{part}"] = torch.cat(gathered)
        return found

    def save(self, folder: Path, singleton: bool, optimizer: bool = True) -> None:
        """Write a Megatron distributed checkpoint of weights and optimizer."""
        from megatron.core import dist_checkpointing

        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(self._state(singleton, False, optimizer), str(folder), async_strategy="mcore")

    def load(self, folder: Path, singleton: bool, strict: str, optimizer: bool = True) -> None:
        """Read one."""
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self._state(singleton, True, optimizer), str(folder), strict=strict)
        self.model.load_state_dict(state["model"])
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])

    def _state(self, singleton: bool, is_loading: bool, optimizer: bool = True) -> dict[str, Any]:
        from megatron.core import parallel_state

        metadata: dict[str, Any] = {
            "singleton_local_shards": singleton,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        if self.distributed_optimizer:
            metadata["distrib_optim_sharding_type"] = "fully_reshardable"
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        state: dict[str, Any] = {"model": self.model.sharded_state_dict(metadata=metadata)}
        if optimizer:
            state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        return state


def _norm(config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:
    """Megatron's own norm for CPUs refuses sequence parallelism, which only needs this mark on the parameters."""
    norm = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
    return norm


def _forward_step(data: Any, model: Any) -> tuple[Tensor, Any]:
    tokens = next(data)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).view(1, 1, SEQUENCE, SEQUENCE)
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())
    return output, partial(_mean)


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return losses.mean(), {"loss": losses.detach().mean()}


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest absolute difference between two models' weights."""
    assert ours.keys() == theirs.keys(), f"{sorted(ours.keys() ^ theirs.keys())} in one of them only"
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)
