"""The training loop: Megatron's DDP, optimizer, schedule of microbatches and distributed checkpoints around one model.

Read :class:`Trainer` top to bottom: build, :meth:`~Trainer.step`, :meth:`~Trainer.save`, :meth:`~Trainer.load`.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch.distributed.checkpoint.api import CheckpointException

from mok_megatron.config import MokConfig
from mok_megatron.errors import MokError
from mok_megatron.training.data import Batch, batches
from mok_megatron.training.model import ModelShape, build_model, model_config


class CheckpointError(MokError):
    """A checkpoint cannot be written or read."""


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one training run.

    Attributes:
        dispatcher: Megatron's ``moe_token_dispatcher_type``.
        backend: of the ``mok`` dispatcher.
        format: of its expert products: ``bf16`` (that is, ``dtype``), ``mxfp8`` or ``blockwise``.
        fp8_gradients: ``e4m3`` or ``e5m2``; fp8_wgrad: ``bf16`` or ``fp8``; as in MokConfig.
        dtype: parameters and activations, fp32 or bf16; main gradients are fp32.
        steps: length of the run, which sets the learning-rate schedule.
        warmup_steps: steps of linear warm-up (fewer in a shorter run), then cosine decay to a tenth.
        learning_rate: at the end of the warm-up.
        micro_batch: sequences a rank and microbatch.
        microbatches: microbatches a step (gradient accumulation).
        distributed_optimizer: shard optimizer state over the data-parallel ranks.
    """

    dispatcher: str
    backend: str = "auto"
    format: str = "bf16"
    fp8_gradients: str = "e4m3"
    fp8_wgrad: str = "bf16"
    dtype: torch.dtype = torch.float32
    steps: int = 60
    warmup_steps: int = 10
    learning_rate: float = 1e-3
    micro_batch: int = 2
    microbatches: int = 1
    distributed_optimizer: bool = True


class Trainer:
    """One model in training on the ranks of the default process group; every method is collective.

    Args:
        shape: sizes of the model.
        settings: of the run.
        dataset: as :func:`mok_megatron.training.data.build_dataset` makes it; the same on every rank.
    """

    def __init__(self, shape: ModelShape, settings: TrainSettings, dataset: GPTDataset) -> None:
        self.settings = settings
        self.step_number = 0
        self.ranks = parallel_state.get_data_parallel_world_size()
        self._dataset = dataset
        self._batches: Iterator[Batch] = self._batches_from_here()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = model_config(
            shape, settings.dispatcher, settings.dtype, parallel_state.get_expert_model_parallel_world_size()
        )
        self.config.mok = MokConfig(
            backend=settings.backend,
            format=settings.format,
            fp8_gradients=settings.fp8_gradients,
            fp8_wgrad=settings.fp8_wgrad,
        )
        model = build_model(self.config, shape).to(self.device)
        wrapped = Float16Module(self.config, model) if settings.dtype == torch.bfloat16 else model
        self.model = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=settings.distributed_optimizer
            ),
            wrapped,
        )
        self.model.broadcast_params()
        self._bare = model
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.learning_rate,
                min_lr=settings.learning_rate / 10,
                weight_decay=0.1,
                adam_beta1=0.9,
                adam_beta2=0.95,
                clip_grad=1.0,
                bf16=settings.dtype == torch.bfloat16,
                params_dtype=settings.dtype,
                use_distributed_optimizer=settings.distributed_optimizer,
            ),
            [self.model],
        )
        self._schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=settings.learning_rate,
            min_lr=settings.learning_rate / 10,
            lr_warmup_steps=min(settings.warmup_steps, settings.steps - 1),
            lr_decay_steps=settings.steps,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=settings.steps,
            wd_incr_style="constant",
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self._forward_backward = get_forward_backward_func()

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, experts of all ranks included."""
        count = torch.zeros(2, dtype=torch.int64, device=self.device)
        for parameter in self._bare.parameters():
            count[0 if getattr(parameter, "allreduce", True) else 1] += parameter.numel()
        torch.distributed.all_reduce(count[1:])
        return int(count.sum())

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step trains on, over all ranks."""
        sequence_length: int = self._dataset.config.sequence_length
        return self.samples_per_step * sequence_length

    @property
    def samples_per_step(self) -> int:
        """Sequences that one step trains on, over all ranks."""
        return self.settings.micro_batch * self.settings.microbatches * self.ranks

    def step(self) -> float:
        """One optimizer step; returns the language-model loss before the update, averaged over all ranks' tokens.

        Raises:
            RuntimeError: the update was skipped (gradients not finite).
        """
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=self._batches,
            model=[self.model],
            num_microbatches=self.settings.microbatches,
            seq_length=self._dataset.config.sequence_length,
            micro_batch_size=self.settings.micro_batch,
            forward_only=False,
        )
        updated, _, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError(f"step {self.step_number}: gradients are not finite; the update was skipped")
        self._schedule.step(increment=1)
        self.step_number += 1
        total = torch.stack([report["lm loss"] for report in reports]).mean(dim=0)
        torch.distributed.all_reduce(total)
        return (total / self.ranks).item()

    def save(self, folder: Path) -> None:
        """Write weights, optimizer state, schedule and step number as a Megatron distributed checkpoint.

        The checkpoint appears under its name only once it is complete; an older one of that name is replaced.

        Raises:
            CheckpointError: the folder cannot be written; raised on every rank.
        """
        _save(self._sharded_state(self._metadata()), folder, self._metadata())

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint that :meth:`save` wrote, under whichever dispatcher.

        Raises:
            CheckpointError: there is no complete checkpoint, or it holds another model.
        """
        state = _load(self._sharded_state(self._metadata(), is_loading=True), folder)
        self._bare.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self.step_number = state["step"]
        self._batches = self._batches_from_here()

    def save_weights(self, folder: Path) -> None:
        """Write the weights alone; otherwise as :meth:`save`."""
        _save({"model": self._bare.sharded_state_dict(metadata=self._metadata())}, folder, self._metadata())

    def load_weights(self, folder: Path) -> None:
        """Start from the weights of a checkpoint; otherwise as :meth:`load`."""
        state = _load({"model": self._bare.sharded_state_dict(metadata=self._metadata())}, folder)
        self._bare.load_state_dict(state["model"])
        self.optimizer.reload_model_params()

    def _batches_from_here(self) -> Iterator[Batch]:
        first = self.step_number * self.samples_per_step
        rank = parallel_state.get_data_parallel_rank()
        return batches(self._dataset, first, self.settings.micro_batch, rank, self.ranks)

    def _forward_step(self, data: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Megatron's forward-step contract: the per-token losses [b, s] and the function that reduces them."""
        batch = {name: tensor.to(self.device) for name, tensor in next(data).items()}
        losses = model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"]
        )
        return losses, partial(_mean_loss, batch["loss_mask"])

    def _metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        if self.settings.distributed_optimizer:
            # The other layout depends on how parameters fill the buckets, which differs between dispatchers.
            metadata["distrib_optim_sharding_type"] = "fully_reshardable"
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
        return metadata

    def _sharded_state(self, metadata: dict[str, Any], is_loading: bool = False) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self._bare.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        state["schedule"] = self._schedule.state_dict()
        state["step"] = self.step_number
        return state


def _mean_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean over the tokens that count; the reported copy is summed in fp64, so that it adds no rounding of its own."""
    weights = mask.reshape(-1)
    losses = losses.reshape(-1)
    mean = (losses.float() * weights).sum() / weights.sum()
    report = (losses.detach().double() * weights).sum() / weights.sum()
    return mean, {"lm loss": report}


def _save(state: dict[str, Any], folder: Path, metadata: dict[str, Any]) -> None:
    unfinished = folder.with_name(folder.name + ".unfinished")
    _on_first_rank(partial(_fresh_folder, unfinished), f"write the checkpoint {folder}")
    try:
        dist_checkpointing.save(state, str(unfinished), content_metadata=_plain(metadata), async_strategy="mcore")
    except CheckpointException as error:
        raise CheckpointError(f"cannot write the checkpoint {folder}: {_reason(error)}") from error
    torch.distributed.barrier()
    _on_first_rank(partial(_move, unfinished, folder), f"write the checkpoint {folder}")


def _load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        raise CheckpointError(f"no complete checkpoint in {folder}. Give the folder that the training run wrote.")
    try:
        # Strict: a key that is missing or left over means another model, and must not pass unnoticed.
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_ALL)
    except (CheckpointingException, CheckpointException) as error:
        raise CheckpointError(
            f"the checkpoint {folder} does not fit this model: {_reason(error)}. Use the sizes it was written with."
        ) from error
    return loaded


def _reason(error: BaseException) -> str:
    """The error that made torch's checkpointing fail on some rank, or Megatron's own message."""
    failures = getattr(error, "failures", None)
    return str(next(iter(failures.values()))[0] if failures else error).strip()


def _plain(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata without process groups, which a checkpoint cannot hold."""
    return {name: value for name, value in metadata.items() if name != "dp_cp_group"}


def _fresh_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _move(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    source.rename(target)


def _on_first_rank(action: Any, purpose: str) -> None:
    """Run a file-system action on rank 0; its failure is raised on every rank, so that none waits for it."""
    message: list[str | None] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            action()
        except OSError as error:
            message[0] = f"cannot {purpose}: {error}. Choose a writable folder."
    torch.distributed.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise CheckpointError(message[0])
