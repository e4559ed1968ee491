"""The model and cluster descriptions under ``configs/``, as typed dataclasses.

    model = load_model("deepseek_v3")            # or a path to a .yaml file
    cluster = load_cluster("gb300_nvl72")

Each file states where every figure comes from (`sources`). See ``configs/models/deepseek_v3.yaml`` and
``configs/clusters/gb300_nvl72.yaml`` for the meaning of the keys.
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from mok_megatron.figures import SMALLEST, WORD, Check, in_range, is_word, positive
from mok_megatron.resources import data_folder
from mok_megatron.typed_yaml import ConfigFileError, load_typed, suggestion

__all__ = [
    "AttentionShape",
    "ClusterConfig",
    "ConfigFileError",
    "ModelConfig",
    "MoeShape",
    "cluster_names",
    "load_cluster",
    "load_model",
    "model_names",
]

# Sizes of each kind of attention that its file must give.
ATTENTION_KINDS = {
    "mla": ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "gqa": ("num_query_groups", "head_dim"),
    "gated_delta_hybrid": (
        "num_query_groups",
        "head_dim",
        "full_attention_interval",
        "linear_key_heads",
        "linear_value_heads",
        "linear_head_dim",
        "linear_conv_kernel",
    ),
    "compressed": ("head_dim", "q_lora_rank", "o_groups", "o_lora_rank"),
}


@dataclass(frozen=True)
class MoeShape:
    """Shape and number of a model's MoE layers. Sizes in elements, `sequence_length` in tokens."""

    hidden_size: int
    moe_ffn_hidden_size: int
    num_experts: int
    topk: int
    shared_expert_intermediate_size: int
    """All shared experts together; 0: the model has none."""
    num_layers: int
    """Transformer layers, dense ones included, MTP excluded."""
    first_dense_layers: int
    """Leading layers with a dense MLP; all others are MoE."""
    dense_ffn_hidden_size: int
    sequence_length: int
    shared_expert_gate: bool = False

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.first_dense_layers

    def check(self) -> Check:
        sizes = [entry.name for entry in dataclasses.fields(self) if entry.type == "int"]
        may_be_zero = ("shared_expert_intermediate_size", "first_dense_layers")
        yield from in_range(self, 1, (name for name in sizes if name not in may_be_zero))
        yield from in_range(self, 0, may_be_zero)
        if self.topk > self.num_experts:
            yield "topk", f"is {self.topk}, more than the {self.num_experts} experts of num_experts"
        if self.first_dense_layers >= self.num_layers:
            yield (
                "first_dense_layers",
                f"is {self.first_dense_layers} of {self.num_layers}: no MoE layer is left",
            )


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a model's attention, as its `kind` needs them, for counting parameters and FLOPs."""

    kind: str
    num_heads: int
    num_query_groups: int | None = None
    head_dim: int | None = None
    output_gate: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    o_groups: int | None = None
    o_lora_rank: int | None = None
    indexer_heads: int | None = None
    indexer_head_dim: int | None = None
    indexer_topk: int | None = None
    full_attention_interval: int | None = None
    linear_key_heads: int | None = None
    linear_value_heads: int | None = None
    linear_head_dim: int | None = None
    linear_conv_kernel: int | None = None

    def size(self, name: str) -> int:
        """A size that this kind of attention must have."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"attention of kind {self.kind!r} has no {name}")
        return value

    def check(self) -> Check:
        if self.kind not in ATTENTION_KINDS:
            yield "kind", f"is {self.kind!r}{suggestion(self.kind, ATTENTION_KINDS)}"
            return
        for name in ATTENTION_KINDS[self.kind]:
            if getattr(self, name) is None:
                yield name, f"is missing: attention of kind {self.kind!r} needs it"
        yield from in_range(self, 1, (f.name for f in dataclasses.fields(self) if "int" in str(f.type)))
        groups = self.num_query_groups
        if groups is not None and self.num_heads % groups:
            yield "num_query_groups", f"is {groups}, which does not divide the {self.num_heads} heads"


@dataclass(frozen=True)
class ModelSizes:
    """What else a plan needs to know of a model."""

    vocab_size: int
    mtp_layers: int = 0
    published_parameters_billion: float | None = None
    global_batch_size: int | None = None
    """Sequences a step in the model's own training, where known."""

    def check(self) -> Check:
        yield from in_range(self, 1, ("vocab_size", "global_batch_size"))
        yield from in_range(self, 0, ("mtp_layers",))


@dataclass(frozen=True)
class ModelConfig:
    """One file of ``configs/models``."""

    title: str
    moe: MoeShape
    attention: AttentionShape
    model: ModelSizes
    megatron_flags: dict[str, bool | int | float | str]
    sources: dict[str, str]
    notes: list[str] = field(default_factory=list)
    name: str = field(default="", init=False)

    def check(self) -> Check:
        yield from _check_sources(self)
        for flag, value in self.megatron_flags.items():
            if not WORD.fullmatch(flag):
                yield "megatron_flags", f"holds {flag!r}, which is no flag's name without its dashes"
            if isinstance(value, str) and not value.isprintable():
                yield "megatron_flags", f"gives {flag} a value of several lines: {value!r}"

    def megatron_arguments(self) -> list[str]:
        """`megatron_flags` as a command line: ``["--num-layers", "61", "--swiglu", ...]``."""
        words: list[str] = []
        for flag, value in self.megatron_flags.items():
            if value is False:
                continue
            words.append(f"--{flag}")
            if value is not True:
                words.append(str(value))
        return words


@dataclass(frozen=True)
class Gpu:
    """One GPU. `memory_gb` in 10^9 bytes, `memory_bandwidth` in GB/s, rates in dense TFLOP/s."""

    name: str
    compute_capability: str
    sms: int
    memory_gb: float
    memory_bandwidth: float
    bf16_tflops: float
    fp8_tflops: float

    def check(self) -> Check:
        yield from is_word(self, ("name",))
        if not re.fullmatch(r"\d{1,2}\.\d", self.compute_capability):
            yield "compute_capability", f"is {self.compute_capability!r}, which is not like '9.0'"
        yield from in_range(self, 2, ("sms",))  # one to communicate, one to multiply
        yield from positive(self, ("memory_gb", "memory_bandwidth", "bf16_tflops", "fp8_tflops"))


@dataclass(frozen=True)
class Node:
    """What one operating system sees: a server, or a tray of an NVL72 rack."""

    name: str
    gpus: int

    def check(self) -> Check:
        yield from is_word(self, ("name",))
        yield from in_range(self, 1, ("gpus",))


@dataclass(frozen=True)
class NvlinkDomain:
    """GPUs that reach one another over NVLink: `nodes` nodes. `limit`: how many domains exist, if bounded."""

    name: str
    nodes: int
    limit: int | None = None

    def check(self) -> Check:
        yield from is_word(self, ("name",))
        yield from in_range(self, 1, ("nodes", "limit"))


@dataclass(frozen=True)
class Nvlink:
    """GB/s per GPU and direction."""

    bandwidth: float

    def check(self) -> Check:
        yield from positive(self, ("bandwidth",))


@dataclass(frozen=True)
class Network:
    """GB/s per GPU and direction between NVLink domains; 0: there is no network."""

    bandwidth: float
    description: str = ""

    def check(self) -> Check:
        if self.bandwidth != 0:
            yield from positive(self, ("bandwidth",))


@dataclass(frozen=True)
class Rates:
    """Share of each peak that is reached, 0 to 1. `measured` says whether on this machine or assumed."""

    measured: bool
    bf16_product: float
    nvlink_pull: float
    nvlink_push: float
    pull_sm_latency_ns: float
    """One communication SM pulls a row in this time plus the row's bytes over `pull_sm_bandwidth` (GB/s)."""
    pull_sm_bandwidth: float
    memory: float
    network: float

    def check(self) -> Check:
        for name in ("bf16_product", "nvlink_pull", "nvlink_push", "memory", "network"):
            value = getattr(self, name)
            if not SMALLEST <= value <= 1:
                yield name, f"is {value}; a share of the peak lies above 0 and not above 1"
        yield from positive(self, ("pull_sm_latency_ns", "pull_sm_bandwidth"))


@dataclass(frozen=True)
class ClusterConfig:
    """One file of ``configs/clusters``."""

    title: str
    gpu: Gpu
    node: Node
    domain: NvlinkDomain
    nvlink: Nvlink
    network: Network
    rates: Rates
    sources: dict[str, str]
    name: str = field(default="", init=False)

    @property
    def domain_gpus(self) -> int:
        """GPUs of one NVLink domain."""
        return self.domain.nodes * self.node.gpus

    def check(self) -> Check:
        yield from _check_sources(self)


def _check_sources(config: object) -> Check:
    """Every section has a source, and every source names a section or a figure of one."""
    sections = {
        entry.name: getattr(config, entry.name)
        for entry in dataclasses.fields(config)  # type: ignore[arg-type]
        if entry.name not in ("title", "name", "notes", "sources")
    }
    sources: dict[str, str] = config.sources  # type: ignore[attr-defined]
    for section in sections:
        if section not in sources:
            yield "sources", f"says nothing of {section!r}: state where its figures come from"
    figures = set(sections)
    for section, value in sections.items():
        keys = value if isinstance(value, dict) else [f.name for f in dataclasses.fields(value)]
        figures.update(f"{section}.{key}" for key in keys)
    for key in sources:
        if key not in figures:
            yield "sources", f"{key!r} names no figure of this file{suggestion(key, figures)}"


def model_names() -> list[str]:
    """Names of the model descriptions that ship with the package."""
    return _names("models")


def cluster_names() -> list[str]:
    """Names of the cluster descriptions that ship with the package."""
    return _names("clusters")


def load_model(name: str | os.PathLike[str]) -> ModelConfig:
    """Description of the model `name`: one of model_names(), or a path that ends in .yaml.

    Raises:
        ConfigFileError: unknown name (with the nearest), or a file that cannot be used (file, line, key).
    """
    return _load("models", name, ModelConfig)


def load_cluster(name: str | os.PathLike[str]) -> ClusterConfig:
    """Description of the cluster `name`: one of cluster_names(), or a path that ends in .yaml.

    Raises:
        ConfigFileError: unknown name (with the nearest), or a file that cannot be used (file, line, key).
    """
    return _load("clusters", name, ClusterConfig)


def _folder(kind: str) -> Path:
    return data_folder("configs") / kind


def _names(kind: str) -> list[str]:
    return sorted(path.stem for path in _folder(kind).glob("*.yaml"))


def _load[C](kind: str, name: str | os.PathLike[str], cls: type[C]) -> C:
    text = os.fspath(name)
    if text.endswith((".yaml", ".yml")) or os.sep in text:
        path = Path(text)
    elif text in _names(kind):
        path = _folder(kind) / f"{text}.yaml"
    else:
        hint = suggestion(text, _names(kind))
        raise ConfigFileError(f"no {kind[:-1]} is called {text!r}{hint} (a path to a .yaml file works too)")
    config = load_typed(path, cls)
    object.__setattr__(config, "name", path.stem)
    return config
