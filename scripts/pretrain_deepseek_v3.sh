#!/usr/bin/env bash
# Pretrains DeepSeek-V3, or a proxy of it, with Megatron.
#
#   scripts/pretrain_deepseek_v3.sh --dry-run              the full recipe: prints the command and checks it, no GPU
#   scripts/pretrain_deepseek_v3.sh --preset proxy-2gpu    trains a proxy on this machine
#   srun --ntasks-per-node=1 --kill-on-bad-exit=1 scripts/pretrain_deepseek_v3.sh --data-path tokens --save saved ...
#
#   --preset P       full (default: 671B, EP 64, PP and DP sized from the number of GPUs), proxy-8gpu, proxy-2gpu,
#                    proxy-1gpu, tiny (two CPU processes)
#   --dispatcher D   mok (default), alltoall, hybridep, deepep
#   --cluster C      a name of configs/clusters or a .yaml file; default: found from the GPUs
#   --gpus N         of a dry run; default: the preset's own number (full: 2048)
#   --dry-run        prints command, environment and parallel layout, checks them without GPUs, and ends
# Every other argument goes to Megatron, unchanged and last, so that it wins over the recipe: --data-path PREFIX (else
# mock data), --tokenizer-type ..., --save DIR, --train-iters N (a short run instead of the report's 14.8T tokens) ...
# Parallel sizes and batches among them are planned with; a changed shape (--num-layers, --seq-length) is not.
#
# Environment
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   several nodes without Slurm; under srun they come from its variables
#                    (which nodes: sbatch as `mok-megatron plan --output` writes it, so that expert groups stay in a rack)
#   GPUS_PER_NODE    default: all that torch sees
#   MEGATRON_LM      a Megatron-LM checkout: runs its pretrain_gpt.py instead of the installed megatron.training
#   PYTHON           an interpreter whose environment is used as it is; default: .venv, set up first if need be
#
# Sources: "Report" is the DeepSeek-V3 Technical Report, arXiv:2412.19437. The model's shape, router and MTP flags and
# their sources are in configs/models/deepseek_v3.yaml. Not as in the Report: bf16 where it has FP8 (3.3; the fused
# layer computes in bf16), Megatron's 1F1B pipeline instead of DualPipe (3.2.1), and sizes planned for this cluster
# instead of PP 16. The Report's last phases (MTP weight 0.1 after 10T tokens, bias update speed 0 and learning rate
# 7.3e-6 at the end, 4.2) are flags of a resumed run: --mtp-loss-scaling-factor, --moe-router-bias-update-rate, --lr.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

die() { echo "pretrain: $*" >&2; exit 2; }

preset=full dispatcher=mok cluster='' gpus='' dry_run=''
user=() # Megatron's
while (($#)); do
    case $1 in
        --preset | --dispatcher | --cluster | --gpus)
            (($# > 1)) || die "$1 needs a value; see --help"
            printf -v "${1#--}" %s "$2"; shift ;;
        --preset=* | --dispatcher=* | --cluster=* | --gpus=*) name=${1%%=*}; printf -v "${name#--}" %s "${1#*=}" ;;
        --dry-run) dry_run=--dry-run ;;
        -h | --help) awk 'NR > 1 && !/^#/ {exit} NR > 1 {sub(/^# ?/, ""); print}' "$0"; exit ;;
        *) user+=("$1") ;;
    esac
    shift
done
# Numbers of the user's must be numbers before arithmetic sees them, which would run a command that stands in one.
count() { [[ -z $2 || $2 =~ ^[1-9][0-9]{0,8}$ ]] || die "$1 is '$2'; give a whole number from 1"; }
count --gpus "$gpus"
for name in NNODES GPUS_PER_NODE SLURM_STEP_NUM_NODES SLURM_JOB_NUM_NODES; do count "$name" "${!name:-}"; done
given() { local word; for word in "${user[@]}"; do [[ $word == "$1" || $word == "$1="* ]] && return; done; return 1; }

python=${PYTHON:-${MOK_VENV:-$root/.venv}/bin/python}
[[ -n ${PYTHON:-} || -x $python ]] || bash "$root/scripts/setup.sh"

# ---- Where: nodes, and GPUs of each

if [[ -n ${SLURM_STEP_NUM_NODES:-} ]]; then # inside srun, one task a node
    [[ $SLURM_STEP_NUM_TASKS == "$SLURM_STEP_NUM_NODES" ]] ||
        die "srun started $SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES nodes; use srun --ntasks-per-node=1: torchrun starts the ranks"
    NNODES=$SLURM_STEP_NUM_NODES NODE_RANK=$SLURM_NODEID
    MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
elif [[ ${SLURM_JOB_NUM_NODES:-1} -gt 1 && -z ${NNODES:-} && -z $dry_run ]]; then
    die "this Slurm job has $SLURM_JOB_NUM_NODES nodes; start the script on each with srun --ntasks-per-node=1"
fi
nodes=${NNODES:-1}
where=(--preset "$preset" --dispatcher "$dispatcher" ${cluster:+--cluster "$cluster"})
if [[ $preset == tiny ]]; then
    export CUDA_VISIBLE_DEVICES='' # trains on the CPU wherever it runs
    per_node=2
    ((nodes == 1)) || die "--preset tiny runs on one machine, and NNODES is $nodes"
elif [[ -n $dry_run ]]; then
    per_node=${GPUS_PER_NODE:-}
    if [[ -z $gpus && -n $per_node ]]; then gpus=$((nodes * per_node)); fi
    [[ -z $gpus ]] || where+=(--gpus "$gpus")
else
    found=$("$python" -W ignore -c 'import torch; n = torch.cuda.device_count(); print(n, torch.cuda.get_device_name(0) if n else "")')
    per_node=${GPUS_PER_NODE:-${found%% *}}
    ((per_node > 0)) || die "--preset $preset needs GPUs, and torch sees none here; --dry-run checks it without, --preset tiny trains on the CPU"
    ((per_node <= ${found%% *})) || die "GPUS_PER_NODE is $per_node, and torch sees ${found%% *} GPUs here"
    [[ -z $gpus ]] || ((gpus == nodes * per_node)) ||
        die "--gpus $gpus, but this launch has $nodes x $per_node; leave --gpus out, or set NNODES and GPUS_PER_NODE"
    where+=(--gpus $((nodes * per_node)) --gpus-per-node "$per_node" --gpu-name "${found#* }")
fi

# ---- How: the recipe

optimizer=( # Report, 4.2; initial values: "standard deviation of 0.006"
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --init-method-std 0.006)
batches=
# The proxies' batches are 1536, 384 and 48 times smaller than the Report's first: the rate falls with the square root,
# as for Adam in Malladi et al., arXiv:2205.10287; at 2.2e-4 proxy-2gpu's loss rises to 20 and its routing collapses.
case $preset in
    proxy-1gpu) lr=5.6e-6 min_lr=5.6e-7 ;;
    proxy-2gpu) lr=1.1e-5 min_lr=1.1e-6 ;;
    proxy-8gpu) lr=3.2e-5 min_lr=3.2e-6 ;;
    *) lr=2.2e-4 min_lr=2.2e-5 ;;
esac
if [[ $preset != full ]] || given --train-iters; then # a short run: one cosine over its steps
    schedule=(--lr $lr --min-lr $min_lr --lr-decay-style cosine --lr-warmup-fraction 0.1)
    given --train-iters || given --train-samples || schedule+=(--train-iters 50)
else # Report, 4.2, in sequences of 4096 tokens: 14.8T in all, 2000 steps of warm-up at 3072 a step, constant
    # until 10T, cosine over 4.3T to 2.2e-5.
    schedule=(--lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style WSD --lr-wsd-decay-style cosine
        --lr-warmup-samples 6144000 --lr-decay-samples 3491210937 --lr-wsd-decay-samples 1049804687)
    given --train-samples || schedule+=(--train-samples 3613281250)
    if ! given --global-batch-size; then # Report: from 3072 to 15360 sequences over 469B tokens; the steps are ours
        batches="0:3072 117B:6144 235B:9216 352B:12288 469B:15360"
        schedule+=(--step-batch-size-schedule "$batches")
    fi
fi
logging=(--log-interval 1 --log-throughput --eval-iters 0 --eval-interval 1000000)
given --seed || logging+=(--seed 1234)
checkpoints=(--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable) # readable at other parallel sizes
! given --save || given --save-interval || checkpoints+=(--save-interval 500)

mapfile -d '' -t model < <("$python" -m mok_megatron.compare.flags "${where[@]}" $dry_run \
    ${batches:+--batch-schedule "$batches"} -- "${user[@]}")
wait $! || exit 2
flags=("${model[@]}" "${optimizer[@]}" "${schedule[@]}" "${logging[@]}" "${checkpoints[@]}" "${user[@]}")

# ---- Start

entry=(-m mok_megatron.pretrain)
if [[ -n ${MEGATRON_LM:-} ]]; then
    [[ -f $MEGATRON_LM/pretrain_gpt.py ]] || die "MEGATRON_LM=$MEGATRON_LM holds no pretrain_gpt.py; name a Megatron-LM checkout"
    [[ $preset != tiny ]] || die "--preset tiny needs this package's CPU mode; leave MEGATRON_LM out"
    export PYTHONPATH=$MEGATRON_LM${PYTHONPATH:+:$PYTHONPATH}
    entry=("$MEGATRON_LM/pretrain_gpt.py")
fi
if ((nodes > 1)); then # the node's rank is fixed: ranks follow the racks
    [[ -n $dry_run || -n ${MASTER_ADDR:-} ]] || die "NNODES is $nodes: set MASTER_ADDR to the first node's name, and NODE_RANK on each"
    rendezvous=(--nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-FIRST_NODE}" --master-port "${MASTER_PORT:-29500}")
else
    rendezvous=(--standalone)
fi
# One hardware queue: kernels of all streams start in the order in which the host enqueues them, on every rank alike.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
command=("$python" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "${per_node:-GPUS_PER_NODE}" "${entry[@]}" "${flags[@]}")

if [[ -n $dry_run ]]; then
    printf 'command\n '
    for word in "${command[@]}"; do
        if [[ $word == --* ]]; then printf ' \\\n   '; fi
        printf ' %q' "$word"
    done
    printf '\nenvironment\n'
    for name in CUDA_DEVICE_MAX_CONNECTIONS OMP_NUM_THREADS CUDA_VISIBLE_DEVICES PYTHONPATH NNODES NODE_RANK MASTER_ADDR MASTER_PORT MOK_TIMEOUT_S; do
        [[ -z ${!name+set} ]] || printf '  %s=%q\n' "$name" "${!name}"
    done
    exec "$python" -m mok_megatron.compare.dry_run "${where[@]}" -- "${flags[@]}"
fi
exec "${command[@]}"
