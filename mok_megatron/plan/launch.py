"""The command lines of a plan: Megatron's flags, torchrun on each node, the Slurm job and its block topology."""

from __future__ import annotations

import itertools
import shlex

from mok_megatron.config import MokConfig, flag_name
from mok_megatron.plan.search import Plan
from mok_megatron.plan.stages import layout_string

ENTRY = "pretrain_gpt.py"
"""Megatron-LM's own script, unchanged: the plugin registers itself."""


def megatron_arguments(plan: Plan) -> list[str]:
    """Flags of the model and of the plan. Data, tokenizer, learning rate and checkpoints are the user's."""
    sizes, training = plan.sizes, plan.training
    words = plan.request.model.megatron_arguments()
    words += ["--tensor-model-parallel-size", str(sizes.tp)]
    if sizes.tp > 1:
        words += ["--sequence-parallel"]
    words += ["--context-parallel-size", str(sizes.cp)]
    words += ["--pipeline-model-parallel-size", str(sizes.pp)]
    if sizes.pp > 1:
        words += ["--pipeline-model-parallel-layout", layout_string(plan.stages)]
    words += ["--expert-model-parallel-size", str(sizes.ep), "--expert-tensor-parallel-size", str(sizes.etp)]
    words += ["--micro-batch-size", str(training.micro_batch), "--global-batch-size", str(plan.global_batch)]
    words += ["--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if training.bf16_moments:
        words += ["--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
    if training.recompute == "full":
        words += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    elif training.recompute == "moe":
        words += ["--recompute-granularity", "selective", "--recompute-modules", "moe"]
    default = MokConfig()
    for name in ("minibatch_size", "macrobatch_size", "capacity_rows"):
        value = getattr(training.config, name)
        if value != getattr(default, name):
            words += [flag_name(name), str(value)]
    words += ["--mok-fwd-comm-sms", str(plan.times.moe_forward.comm_sms)]
    words += ["--mok-bwd-comm-sms", str(plan.times.moe_backward.comm_sms)]
    return words


def node_script(plan: Plan) -> str:
    """What each node runs: node.sh. The node's rank is fixed, because ranks must follow the racks.

    torchrun's elastic rendezvous (--rdzv-backend c10d) numbers nodes by itself and would shuffle them.
    """
    placement = plan.placement
    if placement.nodes == 1:
        start = f"torchrun --standalone --nproc-per-node={placement.ranks_per_node}"
    else:
        start = (
            f"torchrun --nnodes={placement.nodes} --nproc-per-node={placement.ranks_per_node} "
            '--node-rank="${SLURM_NODEID:-$NODE_RANK}" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"'
        )
    lines = [start, f"  {ENTRY}"]
    words = megatron_arguments(plan)
    flags = [i for i, word in enumerate(words) if word.startswith("--")] + [len(words)]
    for begin, end in itertools.pairwise(flags):
        lines.append("  " + shlex.join(words[begin:end]))
    lines.append('  "$@"')
    return "#!/usr/bin/env bash\nset -euo pipefail\n" + " \\\n".join(lines) + "\n"


def job_script(plan: Plan) -> str:
    """The Slurm job: `sbatch job.sh`, beside node.sh."""
    placement = plan.placement
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --nodes={placement.nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={placement.ranks_per_node}",
        "#SBATCH --exclusive",
    ]
    if uses_segments(plan):
        domain = placement.cluster.domain.name
        lines.append(f"# Nodes that stay together in one {domain}; needs TopologyPlugin=topology/block:")
        lines.append(f"#SBATCH --segment={segment(plan)}")
    lines += [
        "set -euo pipefail",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export MASTER_ADDR MASTER_PORT=29500",
        'srun --distribution=block --kill-on-bad-exit=1 bash node.sh "$@"',
    ]
    return "\n".join(lines) + "\n"


def uses_segments(plan: Plan) -> bool:
    """Whether the job needs Slurm's block topology: several nodes in a domain."""
    return plan.placement.cluster.domain.nodes > 1 and plan.placement.nodes > 1


def segment(plan: Plan) -> int:
    """Nodes that Slurm must keep in one block: all that the job takes in a domain.

    Slurm needs the segment to divide the number of nodes. Where the last domain is filled in part, the nodes of one
    expert group are the segment: groups stay whole, and several fit into a block.
    """
    placement = plan.placement
    if placement.nodes % placement.nodes_per_domain == 0:
        return placement.nodes_per_domain
    return max(1, plan.sizes.ep // placement.ranks_per_node)


def topology_conf(plan: Plan) -> str:
    """Lines of Slurm's topology.conf (TopologyPlugin=topology/block): one block a rack. Node names are examples."""
    placement = plan.placement
    domain = placement.cluster.domain
    width = max(2, len(str(placement.domains)))
    lines = [
        f"BlockName={domain.name}{number:0{width}} Nodes={domain.name}{number:0{width}}-node[01-{domain.nodes:02}]"
        for number in range(1, placement.domains + 1)
    ]
    return "\n".join([*lines, f"BlockSizes={domain.nodes}"]) + "\n"
