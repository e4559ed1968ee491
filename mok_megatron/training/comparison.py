"""What the ranks of the quick start do: train under each dispatcher, then continue from each other's checkpoints.

Each function here runs on every rank (see :func:`mok_megatron.training.launch.run_ranks`); rank 0 writes its result as
JSON for the process that started the ranks.
"""

import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mok_megatron.training.data import build_dataset, standard_library_text, write_indexed_dataset
from mok_megatron.training.loop import Trainer, TrainSettings
from mok_megatron.training.model import ModelShape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """The comparison to make.

    Its defaults are small on purpose. Routing is a discrete choice: sooner or later a token's scores for two experts
    are so close that a rounding difference decides, and from then on any two runs drift apart, whichever dispatchers
    they use. The fewer tokens a run routes, the likelier its curves show the dispatchers and not that drift. With 2048
    tokens a step and 16 experts, 3 of 7 runs differed by more than 1e-4 after 60 steps. With 512 tokens and 8 experts,
    in fp32 and over 9 seeds, the largest difference was 4e-5 after 60 steps and 6e-7 after 40.

    Attributes:
        folder: where data, checkpoints and results go.
        dispatchers: the dispatchers to compare; the first one's initial weights are everyone's.
        dtype: ``fp32`` or ``bf16``.
        steps: steps of each uninterrupted run; a checkpoint is saved after half of them.
        resume_steps: steps to repeat from each checkpoint.
        seed: of the initial weights and of the order of the text.
        shape: sizes of the model.
        backend: ``mok``'s backend.
        settings: everything else about the training.
    """

    folder: Path
    dispatchers: tuple[str, ...] = ("mok", "alltoall")
    dtype: str = "fp32"
    steps: int = 40
    resume_steps: int = 5
    seed: int = 1234
    backend: str = "auto"
    shape: ModelShape = field(default_factory=ModelShape)
    settings: TrainSettings = field(default_factory=lambda: TrainSettings(dispatcher=""))

    @property
    def save_step(self) -> int:
        """The number of steps behind the checkpoint."""
        return self.steps // 2

    def checkpoint(self, name: str) -> Path:
        """Folder of the checkpoint of a dispatcher, or of ``initial`` weights."""
        return self.folder / "checkpoints" / name


def write_data(plan: Plan) -> int:
    """Write the training text as an indexed dataset; returns its number of tokens. Runs in the starting process."""
    return write_indexed_dataset(standard_library_text(), plan.folder / "data" / "topics")


def train(rank: int, plan: Plan) -> None:
    """Train every dispatcher from the same initial weights, saving a checkpoint in the middle."""
    result: dict[str, Any] = {"loss": {}, "tokens_per_s": {}, "seconds": {}}
    for dispatcher in plan.dispatchers:
        trainer = make_trainer(plan, dispatcher)
        if dispatcher == plan.dispatchers[0]:
            trainer.save_weights(plan.checkpoint("initial"))
        else:
            trainer.load_weights(plan.checkpoint("initial"))
        losses, seconds = _run(
            trainer, plan.steps, dispatcher, rank, save=(plan.save_step, plan.checkpoint(dispatcher))
        )
        result["loss"][dispatcher] = losses
        result["seconds"][dispatcher] = sum(seconds)
        # The first steps also pay for first uses of libraries.
        steady = sorted(seconds)[len(seconds) // 2]
        result["tokens_per_s"][dispatcher] = trainer.tokens_per_step / steady
    result["parameters"] = trainer.parameters
    _write(rank, plan, "train", result)


def resume(rank: int, plan: Plan) -> None:
    """Continue from every dispatcher's checkpoint under every dispatcher."""
    result: dict[str, Any] = {}
    for source in plan.dispatchers:
        for dispatcher in plan.dispatchers:
            trainer = make_trainer(plan, dispatcher)
            trainer.load(plan.checkpoint(source))
            label = f"{source} -> {dispatcher}"
            result[f"{source}_to_{dispatcher}"], _ = _run(trainer, plan.resume_steps, label, rank)
    _write(rank, plan, "resume", result)


def read_result(plan: Plan, phase: str) -> dict[str, Any]:
    """The JSON that rank 0 wrote at the end of ``train`` or ``resume``."""
    result: dict[str, Any] = json.loads((plan.folder / f"{phase}.json").read_text())
    return result


def make_trainer(plan: Plan, dispatcher: str) -> Trainer:
    """A trainer of the plan's model and data under a dispatcher. Collective."""
    settings = replace(
        plan.settings, dispatcher=dispatcher, dtype=DTYPES[plan.dtype], steps=plan.steps, backend=plan.backend
    )
    shape = replace(plan.shape, seed=plan.seed)
    samples = plan.steps * settings.micro_batch * settings.microbatches * torch.distributed.get_world_size()
    folder = plan.folder / "data"
    dataset = build_dataset(folder / "topics", shape.sequence_length, samples, plan.seed, folder / "cache")
    return Trainer(shape, settings, dataset)


def _run(
    trainer: Trainer, steps: int, label: str, rank: int, save: tuple[int, Path] | None = None
) -> tuple[list[float], list[float]]:
    """Train ``steps`` steps behind a progress bar; returns each step's loss and seconds."""
    losses, seconds = [], []
    # A terminal gets a live bar, a log file a line now and then.
    interval = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(total=steps, desc=f"{label:20}", unit="step", disable=rank != 0, mininterval=interval) as bar:
        for _ in range(steps):
            start = time.perf_counter()
            losses.append(trainer.step())
            seconds.append(time.perf_counter() - start)
            bar.set_postfix_str(f"loss {losses[-1]:.4f}, {trainer.tokens_per_step / seconds[-1]:,.0f} tokens/s", False)
            bar.update()
            if save is not None and trainer.step_number == save[0]:
                trainer.save(save[1])
    return losses, seconds


def _write(rank: int, plan: Plan, phase: str, result: dict[str, Any]) -> None:
    if rank == 0:
        (plan.folder / f"{phase}.json").write_text(json.dumps(result))
