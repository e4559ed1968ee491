"""Trains a small DeepSeek-V3-shaped model with one feature of Megatron after another, under mok and under alltoall.

    torchrun --nproc-per-node 2 -m tests.training.features [--steps 3] [--only base,MTP] [--out features.json]

One process trains with EP 1 what one can; the features that need two ranks are left out.

All of it happens in one launch, through the entry point of `mok_megatron.pretrain` and Megatron's own flags: a process
needs longer to import Megatron than to train these models. Rank 0 prints a line a feature: the largest relative
difference of the loss to alltoall's, and "ok" or what failed. Exit status 1 where one did not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.training.host_time import host_times
from tests.training.repeated import DEADLINE_S, rank, ranks, train

LIMIT = 1e-3
"""Largest relative difference of a loss to alltoall's (bf16; on the CPU fp32 differs by far less)."""
FP8_LIMIT = 1e-2
"""The same in FP8: weight gradients are products of bf16 under mok, of FP8 under alltoall."""
HOST = "host time of a layer"
STEPS = 200
LONG = f"{STEPS} steps"
GENTLE = "--lr 1e-4 --min-lr 1e-5 --lr-warmup-iters 20 --global-batch-size 2".split()
SAVED = 2
"""Steps after which a checkpoint is written; a run has three times as many."""
SHARED = """
    --transformer-impl {implementation} --num-layers 2 --moe-layer-freq [0,1]
    --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --seq-length 256 --max-position-embeddings 256
    --micro-batch-size 1 --multi-latent-attention --q-lora-rank 128 --kv-lora-rank 128 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 128 --rotary-scaling-factor 1.0 --qk-layernorm
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --num-experts 8 --moe-ffn-hidden-size 256 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
    --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-shared-expert-intermediate-size 256 --no-create-attention-mask-in-dataloader
    --optimizer adam --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 1 --clip-grad 1.0 --seed 1234
    --global-batch-size 4 --eval-iters 0 --eval-interval 1000 --log-interval 1 --split 1,0,0
    --tokenizer-type NullTokenizer --vocab-size 512
""".split()
ON_GPUS = "--bf16 --moe-grouped-gemm --te-rng-tracker --disable-jit-fuser".split()  # compiled for longer than trained
GRAPH = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad".split()
FP8 = "--fp8-format e4m3 --fp8-recipe blockwise"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


@dataclass(frozen=True)
class Feature:
    """Flags besides the shared ones.

    Attributes:
        flags: of Megatron.
        ep: expert-parallel size, where there are as many ranks.
        ranks: that it needs.
        optimizer: use the distributed optimizer.
        baseline: the dispatcher, and the flags where they differ, whose losses must come out.
        gpus: needs GPUs, or Transformer Engine.
        steps: more than the others need.
        limit: of the difference.
    """

    flags: str = ""
    ep: int = 2
    ranks: int = 1
    optimizer: bool = True
    baseline: tuple[str, str | None] = ("alltoall", None)
    gpus: bool = False
    steps: int = 0
    limit: float = LIMIT


FEATURES = {
    "base: distributed optimizer, gradient accumulation fusion, expert bias": Feature(),
    "no gradient accumulation fusion": Feature("--no-gradient-accumulation-fusion"),
    "plain optimizer": Feature(optimizer=False),
    "overlapped gradient reduction": Feature("--overlap-grad-reduce", ep=1),
    "overlapped gradient reduction and parameter gathering": Feature("--overlap-grad-reduce --overlap-param-gather"),
    "recompute moe": Feature("--recompute-granularity selective --recompute-modules moe"),
    "recompute norms, latent projections and shared expert": Feature(
        "--recompute-granularity selective --recompute-modules layernorm mla_up_proj shared_experts", gpus=True
    ),
    "recompute whole layers": Feature(" ".join(RECOMPUTE)),
    "MTP": Feature("--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"),
    "EP 1, DP 2": Feature(ep=1, ranks=2),
    "TP 2 and sequence parallel, EP 2": Feature(
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1", ranks=2, gpus=True
    ),
    "logs of the layers": Feature("--log-mok"),
    "PP 2, EP 1": Feature("--pipeline-model-parallel-size 2", ep=1, ranks=2),
    "forced load balancing": Feature("--moe-router-force-load-balancing"),
    "fused router": Feature("--moe-router-fusion", gpus=True),
    "small macrobatch, so that rows are evicted": Feature("--mok-minibatch-size 128 --mok-macrobatch-size 256"),
}
LATER: dict[str, Feature] = {
    "FP8 with block scales": Feature(FP8, gpus=True, steps=8, limit=FP8_LIMIT),
    "FP8 with block scales, against bf16": Feature(FP8, gpus=True, steps=8, limit=FP8_LIMIT, baseline=("mok", "")),
    "packed sequences": Feature("--dataloader-inter-document-masking", gpus=True),
    "full-iteration CUDA graph": Feature(" ".join(GRAPH), gpus=True, steps=6, baseline=("mok", "")),
    "latent experts": Feature("--moe-latent-size 128", gpus=True),
    "graphs of attention and router": Feature(
        "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess "
        "--cuda-graph-warmup-steps 2 --moe-shared-expert-overlap",
        gpus=True,
        steps=6,
        baseline=("mok", ""),
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Train them all; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default="", help="words that a feature's name must contain one of")
    parser.add_argument(
        "--out", type=Path, help="JSON of the results so far, rewritten after each; what is in it is not repeated"
    )
    parser.add_argument("--data", type=Path, default=Path("runs/features"), help="folder for the text")
    args = parser.parse_args(argv)
    on_gpus = torch.cuda.is_available()
    data, results = start(args.data.resolve(), args.out)
    flags = [*common(on_gpus), *data]
    trained: dict[tuple[str, ...], list[float]] = {}

    def wanted(name: str) -> bool:
        return name not in results and (not args.only or any(word in name for word in args.only.split(",")))

    def settle(name: str, action: Callable[[], dict[str, Any]]) -> None:
        note(args.out, results | {name: {"verdict": "did not end"}})
        try:
            results[name] = action()
        except BaseException as error:
            results[name] = failure(error)
        note(args.out, results)
        if rank() == 0 or "error" in results[name]:
            print(f"{name}: {describe(results[name])}", flush=True)
        if "error" in results[name] and not all_failed(args.data, name):
            os._exit(1)  # the ranks are no longer at the same place

    def features(table: dict[str, Feature]) -> None:
        for name, feature in table.items():
            if wanted(name) and feature.ranks <= ranks() and (on_gpus or not feature.gpus):
                settle(name, partial(check, feature, max(args.steps, feature.steps), flags, trained))

    features(FEATURES)
    for name, action in continued(flags, args.data).items():
        if wanted(name):
            settle(name, action)
    if on_gpus and wanted(LONG):
        settle(LONG, partial(long_training, flags))
    if on_gpus and wanted(HOST):
        settle(HOST, partial(host_times, flags))
    features(LATER)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0 if all(result["verdict"] == "ok" for result in results.values()) else 1


def all_failed(folder: Path, name: str) -> bool:
    """Whether every rank reports a failure of `name` within ten seconds: then the next training can start."""
    folder = folder / f"failed-{os.environ.get('MASTER_PORT', 0)}-{os.getppid()}" / name.replace("/", " ")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(rank())).touch()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if len(list(folder.iterdir())) == ranks():
            return True
        time.sleep(0.05)
    return False


def check(
    feature: Feature, steps: int, flags: list[str], trained: dict[tuple[str, ...], list[float]]
) -> dict[str, Any]:
    """Train under mok and under the baseline, and compare."""
    dispatcher, others = feature.baseline
    losses = []
    start = time.perf_counter()
    for name, words in (("mok", feature.flags), (dispatcher, feature.flags if others is None else others)):
        own = [*words.split(), "--train-iters", str(steps)]
        own += ["--expert-model-parallel-size", str(min(feature.ep, ranks()))]
        own += ["--use-distributed-optimizer"] if feature.optimizer else []
        if name != "mok":
            own = without_mok(own)
        key = (name, *own)
        if key not in trained:
            trained[key] = train([*flags, *own, "--moe-token-dispatcher-type", name])
        losses.append(trained[key])
    if len(losses[0]) != steps:
        return {"verdict": f"{len(losses[0])} of {steps} steps", "difference": 0.0, "against": dispatcher, "s": 0.0}
    return verdict(*losses, feature.limit, start, dispatcher)


def long_training(flags: list[str]) -> dict[str, Any]:
    """`STEPS` steps at a gentle rate, against alltoall; and how far other dispatchers of Megatron, which compute the
    same with other roundings, come away from alltoall by themselves (`others`)."""
    begin = time.perf_counter()
    flags = [*flags, *GENTLE, "--train-iters", str(STEPS), "--expert-model-parallel-size", str(min(2, ranks()))]
    ours, theirs, fused, allgather = (
        train([*flags, "--use-distributed-optimizer", "--moe-token-dispatcher-type", *words.split()])
        for words in ("mok", "alltoall", "alltoall --moe-permute-fusion", "allgather")
    )
    others = {"alltoall with fused permutation": fused, "allgather": allgather}
    return verdict(ours, theirs, LIMIT, begin, "alltoall") | {
        "others": {name: verdict(losses, theirs, LIMIT, begin)["difference"] for name, losses in others.items()}
    }


def continued(flags: list[str], folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Repeated, interrupted and handed over, saved in the middle; deterministic where the bits must come out."""
    flags = [*flags, *f"--expert-model-parallel-size {min(2, ranks())} --train-iters {3 * SAVED}".split()]
    flags += ["--use-distributed-optimizer", "--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable"]
    folder = folder / f"saved-{os.environ.get('MASTER_PORT', 0)}-{os.getppid()}"
    losses: dict[str, list[float]] = {}

    def run(dispatcher: str, exact: bool, *others: str) -> list[float]:
        settings = ["--deterministic-mode"] if exact else []
        return train([*flags, *settings, "--moe-token-dispatcher-type", dispatcher, *others])

    def whole(dispatcher: str, exact: bool) -> tuple[list[float], str]:
        name = f"{dispatcher}-{exact}"
        if name not in losses:
            losses[name] = run(dispatcher, exact, "--save", str(folder / name), "--save-interval", str(SAVED))
        return losses[name], str(folder / name)

    def again() -> dict[str, Any]:
        begin = time.perf_counter()
        return verdict(run("mok", True), whole("mok", True)[0], 0.0, begin)

    def rest(dispatcher: str, saved_by: str) -> dict[str, Any]:
        begin, exact = time.perf_counter(), dispatcher == saved_by
        expected, saved = whole(saved_by, exact)
        found = run(dispatcher, exact, "--load", saved, "--ckpt-step", str(SAVED))
        return verdict(found, expected[SAVED:], 0.0 if exact else LIMIT, begin)

    def twice() -> dict[str, Any]:
        begin = time.perf_counter()
        expected, saved = whole("alltoall", False)
        second = ["--save", str(folder / "second"), "--save-interval", str(SAVED)]
        found = run("mok", False, "--load", saved, "--ckpt-step", str(SAVED), *second)[:SAVED]
        found += run("alltoall", False, "--load", second[1], "--ckpt-step", str(2 * SAVED))
        return verdict(found, expected[SAVED:], LIMIT, begin)

    return {
        "same seed twice, the same bits": again,
        "resumed, the same bits": partial(rest, "mok", "mok"),
        "a checkpoint of mok continues under alltoall": partial(rest, "alltoall", "mok"),
        "a checkpoint of alltoall continues under mok": partial(rest, "mok", "alltoall"),
        "a checkpoint of alltoall continues under mok, and that under alltoall": twice,
    }


def verdict(
    ours: list[float], theirs: list[float], limit: float, begin: float, against: str = "the other run"
) -> dict[str, Any]:
    """Whether two curves agree."""
    difference = max((abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=False)), default=0.0)
    alike = difference <= limit and len(ours) == len(theirs) > 0
    words = "ok" if alike else "differs" if len(ours) == len(theirs) else f"{len(ours)} steps against {len(theirs)}"
    seconds = time.perf_counter() - begin
    return {
        "verdict": words,
        "difference": difference,
        "mok": ours,
        "baseline": theirs,
        "against": against,
        "s": seconds,
    }


def failure(error: BaseException) -> dict[str, Any]:
    """A result that says where it failed."""
    lines = traceback.format_exc().strip().splitlines()
    return {"verdict": "failed", "error": f"{type(error).__name__}: {error}", "trace": lines[-16:]}


def common(on_gpus: bool) -> list[str]:
    """Flags of every training."""
    from mok_megatron.pretrain import ON_CPU

    words = [word.format(implementation="transformer_engine" if on_gpus else "local") for word in SHARED]
    return [*words, *(ON_GPUS if on_gpus else ON_CPU)]


def without_mok(words: list[str]) -> list[str]:
    """Without --mok-* flags and their values: other dispatchers do not have them."""
    kept = []
    for i, word in enumerate(words):
        if not word.startswith("--mok-") and not (i and words[i - 1].startswith("--mok-")):
            kept.append(word)
    return kept


def start(folder: Path, out: Path | None) -> tuple[list[str], dict[str, Any]]:
    """Data and earlier results, the same for all ranks: rank 0 writes them, the others wait for the last file.

    Returns:
        Flags of real text, a token a byte, and the results that `out` holds.
    """
    from mok_megatron.training.data import standard_library_text, write_indexed_dataset

    folder = folder / f"launch-{os.environ.get('MASTER_PORT', 0)}-{os.getppid()}"
    earlier = folder / "earlier.json"
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_indexed_dataset(standard_library_text()[:40], folder / "text")
        (folder / "unfinished").write_text(out.read_text() if out and out.exists() else "{}")
        (folder / "unfinished").rename(earlier)
    deadline = time.monotonic() + DEADLINE_S
    while not earlier.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not write {earlier} within {DEADLINE_S} s")
        time.sleep(0.01)
    return ["--data-path", str(folder / "text"), "--data-cache-path", str(folder / "cache")], json.loads(
        earlier.read_text()
    )


def note(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None and rank() == 0:
        path.write_text(json.dumps(results, indent=1))


def markdown_rows(results: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of a table; the documents quote a record with these."""
    lines = []
    for name, result in results.items():
        if "us" in result:
            continue
        found = f"{result['difference']:.1e} from {result['against']}" if "difference" in result else "-"
        lines.append(f"| {name} | {result['verdict']} | {found} |")
    return lines


def describe(result: dict[str, Any]) -> str:
    """A line."""
    if "error" in result:
        return f"{result['verdict']}: {result['error']}\n  " + "\n  ".join(result["trace"])
    if "us" in result:
        return (
            f"{result['verdict']} (" + ", ".join(f"{name} {value:.0f} us" for name, value in result["us"].items()) + ")"
        )
    return f"{result['verdict']} ({result['difference']:.1e} from {result['against']}, {result['s']:.1f} s)"


if __name__ == "__main__":
    from mok_megatron import host, register

    register()
    if not torch.cuda.is_available():
        host.enable(training=True)
    sys.exit(main())
