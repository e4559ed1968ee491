"""The sizes of the recipe: which model, on how many GPUs, and the plan of its parallel sizes."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from mok_megatron.configs import ClusterConfig, ModelConfig, cluster_names, load_cluster, load_model
from mok_megatron.errors import MokConfigError
from mok_megatron.plan.request import Request
from mok_megatron.plan.search import Plan, make_plan


class PresetError(MokConfigError):
    """A preset that cannot run on what was found or asked for."""


@dataclass(frozen=True)
class Preset:
    """One size of the recipe.

    Attributes:
        model: name of the description under ``configs/models`` that it starts from.
        gpus: ranks that it is meant for; the only number that works unless ``any_gpus``.
        cluster: description under ``configs/clusters`` that a dry run plans for; None: the CPU.
        layers: transformer layers, of which the first ``dense_layers`` are dense; None: the model's own.
        experts: routed experts of a MoE layer; None: the model's own.
        vocabulary: entries of the vocabulary; None: the model's own.
        mtp: keep the model's multi-token-prediction layer.
        request: what the planner is told; the sizes it is not told are searched.
        parallel: expert-parallel size, micro-batch and global batch where there is no plan (on the CPU).
    """

    name: str
    model: str
    gpus: int
    cluster: str | None
    any_gpus: bool = False
    layers: int | None = None
    dense_layers: int = 1
    experts: int | None = None
    vocabulary: int | None = None
    mtp: bool = True
    request: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, int] = field(default_factory=dict)

    @property
    def on_gpus(self) -> bool:
        return self.cluster is not None


# A proxy's vocabulary keeps the share of the output layer: 129,280 x 4 / 61 = 8,477 and x 8 / 61 = 16,955, rounded.
PROXY_2GPU = Preset(
    name="proxy-2gpu",
    model="deepseek_v3",
    gpus=2,
    cluster="h200_x2",
    layers=4,
    experts=16,
    vocabulary=8192,
    mtp=False,
    request={"tp": 1, "cp": 1, "ep": 2, "pp": 1, "global_batch": 8, "recompute": "none"},
)

PRESETS = {
    preset.name: preset
    for preset in (
        # TP 1 and EP 64: DeepSeek-V3 Technical Report, section 3.2 (PP 16 there, on other hardware; here planned).
        # Moments in bf16: section 3.3.3.
        Preset(
            name="full",
            model="deepseek_v3",
            gpus=2048,  # section 3.1
            cluster="gb300_nvl72",
            any_gpus=True,
            request={"tp": 1, "cp": 1, "ep": 64, "bf16_moments": True},
        ),
        Preset(
            name="proxy-8gpu",
            model="deepseek_v3",
            gpus=8,
            cluster="hgx_h200_8gpu",
            layers=8,
            experts=64,
            vocabulary=16384,
            request={"tp": 1, "cp": 1, "ep": 8, "pp": 1, "global_batch": 64, "recompute": "none"},
        ),
        PROXY_2GPU,
        # All experts on the one GPU; two microbatches, so that gradients accumulate.
        dataclasses.replace(
            PROXY_2GPU, name="proxy-1gpu", gpus=1, request=PROXY_2GPU.request | {"ep": 1, "global_batch": 2}
        ),
        Preset(
            name="tiny",
            model="tiny",
            gpus=2,
            cluster=None,
            parallel={"ep": 2, "micro_batch": 1, "global_batch": 8},
        ),
    )
}


def find_preset(name: str) -> Preset:
    """The preset called ``name``; PresetError lists those that exist."""
    if name not in PRESETS:
        raise PresetError(f"--preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def preset_model(preset: Preset, dispatcher: str = "mok") -> ModelConfig:
    """The preset's model: its base description with fewer layers, experts and words, and Megatron's flags to match."""
    model = load_model(preset.model)
    moe, sizes, flags = model.moe, model.model, dict(model.megatron_flags)
    if preset.layers is not None:
        moe = dataclasses.replace(moe, num_layers=preset.layers, first_dense_layers=preset.dense_layers)
        flags["num-layers"] = preset.layers
        flags["moe-layer-freq"] = f"([0]*{preset.dense_layers}+[1]*{preset.layers - preset.dense_layers})"
    if preset.experts is not None:
        moe = dataclasses.replace(moe, num_experts=preset.experts)
        flags["num-experts"] = preset.experts
        groups, chosen = int(flags["moe-router-num-groups"]), int(flags["moe-router-group-topk"])
        if preset.experts // groups * chosen <= moe.topk:
            # So few experts that choosing groups would choose the experts: routing over all of them instead.
            flags |= {"moe-router-num-groups": False, "moe-router-group-topk": False}
    if preset.vocabulary is not None:
        sizes = dataclasses.replace(sizes, vocab_size=preset.vocabulary)
    if not preset.mtp and sizes.mtp_layers:
        sizes = dataclasses.replace(sizes, mtp_layers=0)
        flags |= {"mtp-num-layers": False, "mtp-loss-scaling-factor": False}
    flags["moe-token-dispatcher-type"] = dispatcher
    title = model.title if preset.any_gpus or not preset.on_gpus else f"{model.title}, {preset.name}"
    changed = dataclasses.replace(model, title=title, moe=moe, model=sizes, megatron_flags=flags)
    object.__setattr__(changed, "name", model.name)
    return changed


def find_cluster(gpu_name: str, gpus_per_node: int) -> ClusterConfig:
    """The shipped description for nodes of ``gpus_per_node`` GPUs that the driver calls ``gpu_name``.

    Raises:
        PresetError: none fits.
    """
    words = gpu_name.split()
    fitting = [c for c in map(load_cluster, cluster_names()) if c.gpu.name in words and c.node.gpus >= gpus_per_node]
    if not fitting:
        raise PresetError(
            f"no description under configs/clusters fits nodes of {gpus_per_node} x {gpu_name}; name one with "
            f"--cluster ({', '.join(cluster_names())}, or a .yaml file of your own)"
        )
    return min(fitting, key=lambda cluster: cluster.node.gpus)


def make_preset_plan(
    preset: Preset, cluster: ClusterConfig, gpus: int, dispatcher: str = "mok", **changes: int | None
) -> Plan:
    """Parallel sizes for ``gpus`` GPUs, checked against memory and NVLink domain.

    Args:
        changes: fields of `Request` that the user's own flags set; None: not set.

    Raises:
        MokConfigError: the preset needs another number of GPUs, or no plan fits.
    """
    if not preset.any_gpus and gpus != preset.gpus:
        needed = f"{preset.gpus} GPU{'s' * (preset.gpus > 1)}"
        raise PresetError(
            f"--preset {preset.name} runs on {needed}, and {gpus} were found or asked for; choose another preset "
            f"({', '.join(PRESETS)}), or the GPUs with CUDA_VISIBLE_DEVICES"
        )
    asked = preset.request | {name: value for name, value in changes.items() if value is not None}
    try:
        return make_plan(Request(model=preset_model(preset, dispatcher), cluster=cluster, gpus=gpus, **asked))
    except MokConfigError as error:
        raise PresetError(_in_megatron_words(str(error))) from error


def _in_megatron_words(text: str) -> str:
    """The planner's message with Megatron's names for its flags."""
    for short, name in (("tp", "tensor"), ("cp", "context"), ("ep", "expert"), ("pp", "pipeline")):
        megatron = "context-parallel-size" if short == "cp" else f"{name}-model-parallel-size"
        text = re.sub(rf"--{short}\b", f"--{megatron}", text)
    text = re.sub(r"; --bf16-moments saves [^;\n]*", "", text)
    return re.sub(r"--(global|micro)-batch\b(?!-)", r"--\1-batch-size", text)
