"""``python -m mok_megatron.pretrain`` with Megatron's own flags, on two CPU ranks under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mok_megatron import pretrain
from mok_megatron.training.data import standard_library_text, write_indexed_dataset

REPOSITORY = Path(__file__).parents[2]
MODEL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 64
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8
    --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8
    --v-head-dim 16 --rope-type rope --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope --mtp-num-layers 1
    --num-experts 4 --moe-layer-freq [0,1] --moe-ffn-hidden-size 64 --moe-router-topk 2
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-shared-expert-intermediate-size 64 --expert-model-parallel-size 2
    --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --lr-decay-iters 4 --lr-warmup-iters 1
    --eval-iters 0 --eval-interval 100 --log-interval 1 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable
    --tokenizer-type NullTokenizer --vocab-size 257
""".split()

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; GPUs have their own tests")


def launch(*flags: str, ranks: int = 2) -> subprocess.CompletedProcess:
    """Run the entry point, under torchrun if on several ranks."""
    command = [sys.executable, "-W", "ignore"]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "mok_megatron.pretrain", *MODEL, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def losses(run: subprocess.CompletedProcess) -> dict[int, float]:
    """Losses of Megatron's log, by iteration."""
    found = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", run.stdout + run.stderr)
    return {int(step): float(loss) for step, loss in found}


@on_cpu
def test_pretrain_saves_under_mok_and_continues_under_alltoall(tmp_path):
    write_indexed_dataset(standard_library_text()[:20], tmp_path / "text")
    flags = ["--data-path", str(tmp_path / "text"), "--split", "1,0,0", "--train-iters", "4", "--save-interval", "2"]
    flags += ["--data-cache-path", str(tmp_path / "cache")]
    mok = launch(*flags, "--moe-token-dispatcher-type", "mok", "--log-mok", "--save", str(tmp_path / "saved"))
    assert mok.returncode == 0, mok.stdout[-3000:] + mok.stderr[-3000:]
    uninterrupted = losses(mok)
    assert mok.stdout.count("mok of the last microbatch | largest imbalance: ") == 4
    assert mok.stdout.count("MoE layers of a step | forward (ms): ") == 4
    assert list(uninterrupted) == [1, 2, 3, 4] and uninterrupted[4] < uninterrupted[1]

    flags += ["--moe-token-dispatcher-type", "alltoall", "--load", str(tmp_path / "saved"), "--ckpt-step", "2"]
    continued = launch(*flags, "--log-mok")
    assert continued.returncode == 0, continued.stdout[-3000:] + continued.stderr[-3000:]
    # Megatron's first line after a start does not reset its average, so the second is the mean of both.
    expected = {3: uninterrupted[3], 4: (uninterrupted[3] + uninterrupted[4]) / 2}
    assert continued.stdout.count("MoE layers of a step | forward (ms): ") == 2
    assert losses(continued) == pytest.approx(expected, abs=2e-6)


@on_cpu
def test_bad_flags_are_refused_in_one_message(tmp_path):
    (tmp_path / "file").touch()
    absent, unwritable = tmp_path / "absent", tmp_path / "file" / "saved"
    flags = ["--sft", "--data-path", str(absent), "--save", str(unwritable), "--save-interval", "1"]
    refused = launch(*flags, "--train-iters", "1", "--expert-model-parallel-size", "1", ranks=1)
    assert refused.returncode == 2
    for part in ("--sft", f"{absent}.bin", f"--save {unwritable} cannot be written"):
        assert part in refused.stderr, refused.stderr[-3000:]


def test_dataset_helper_is_not_built_where_it_is_compiled(monkeypatch):
    from megatron.core.datasets import utils

    def make() -> None:
        raise AssertionError("make was called")

    monkeypatch.setattr(utils, "compile_helpers", make)
    pretrain.skip_dataset_helper_build()
    utils.compile_helpers()


def test_a_missing_dataset_helper_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
    monkeypatch.delattr("megatron.core.datasets.helpers_cpp", raising=False)
    with pytest.raises(pretrain.PretrainError, match="pip install"):
        pretrain.skip_dataset_helper_build()


def test_a_makefile_is_left_alone(monkeypatch, tmp_path):
    """In a Megatron-LM checkout the helper is built as usual."""
    from megatron.core.datasets import utils

    (tmp_path / "Makefile").touch()
    monkeypatch.setattr(utils, "__file__", str(tmp_path / "utils.py"))
    original = utils.compile_helpers
    pretrain.skip_dataset_helper_build()
    assert utils.compile_helpers is original
