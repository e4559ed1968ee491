"""The settings that are searched, and what the simulation expects of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from mok_megatron.bench.problem import Shape
from mok_megatron.config import MokConfig
from mok_megatron.configs import ClusterConfig, cluster_names, load_cluster
from mok_megatron.errors import MokConfigError

COMM_SMS = (0, 4, 8, 16)
MINIBATCHES = (512, 1024, 2048, 4096)
MACROBATCHES = (0.5, 2.0)
"""Times the default's rows, tried at the best of the other settings."""
PROMISING = 1.15
"""A point is worth measuring if either direction is expected within this factor of the best expected."""


@dataclass(frozen=True)
class Point:
    """Settings of one measurement. Both directions run with `comm_sms`; neither sees the other's, so the best of each
    are combined afterwards. `macrobatch` None is the default."""

    comm_sms: int
    minibatch: int
    macrobatch: int | None = None

    def config(self, base: MokConfig) -> MokConfig:
        """`base` with these settings."""
        return settings(base, self.comm_sms, self.comm_sms, self.minibatch, self.macrobatch)


@dataclass(frozen=True)
class Expected:
    """Milliseconds of each direction, by simulation."""

    forward: float
    backward: float


def settings(base: MokConfig, forward: int, backward: int, minibatch: int, macrobatch: int | None) -> MokConfig:
    """`base` with communication SMs of each direction and rows of minibatch and macrobatch."""
    return dataclasses.replace(
        base, fwd_comm_sms=forward, bwd_comm_sms=backward, minibatch_size=minibatch, macrobatch_size=macrobatch
    )


def default_point(base: MokConfig) -> Point:
    """The defaults of MokConfig, which have the same communication SMs in both directions."""
    assert base.fwd_comm_sms == base.bwd_comm_sms
    return Point(base.fwd_comm_sms, base.minibatch_size, base.macrobatch_size)


def candidates(shape: Shape, comm_sms: Iterable[int], minibatches: Iterable[int], base: MokConfig) -> list[Point]:
    """Every combination with the default macrobatch; minibatches beyond all rows of a rank would be the same again."""
    rows = base.macrobatch_rows(shape.tokens * shape.topk)
    default = default_point(base)
    sizes = sorted({default.minibatch, *(size for size in minibatches if size <= rows)})
    return [Point(sms, size) for size in sizes for sms in sorted({default.comm_sms, *comm_sms})]


def find_cluster(gpu: str, ep: int) -> ClusterConfig | None:
    """The described cluster with this GPU (``"NVIDIA H200"``) and a domain of at least `ep`; measured rates first."""
    words = gpu.lower().split()
    clusters = [load_cluster(name) for name in cluster_names()]
    fitting = [c for c in clusters if c.gpu.name.lower() in words and c.domain_gpus >= ep]
    return min(fitting, key=lambda cluster: not cluster.rates.measured, default=None)


def expect(
    points: Sequence[Point],
    shape: Shape,
    cluster: ClusterConfig,
    ep: int,
    base: MokConfig,
    progress: bool = False,
) -> dict[Point, Expected | str]:
    """What the simulation gives for each point, or why it gives nothing. `progress`: a bar on stderr, if a terminal."""
    from mok_megatron.simulate.layer import LayerShape, total_time

    layer = LayerShape(**dataclasses.asdict(shape))
    found: dict[Point, Expected | str] = {}
    for point in tqdm(points, unit="point", desc="predicting", disable=None if progress else True):
        try:
            config = point.config(base)
            found[point] = Expected(*(total_time(layer, cluster, ep, config, d) / 1e3 for d in (True, False)))
        except MokConfigError as error:
            found[point] = str(error)
    return found


def promising(points: Sequence[Point], expected: dict[Point, Expected | str], default: Point) -> list[Point]:
    """What to measure, best first: the default, then points that may win a direction. All if nothing is expected."""
    known = {point: value for point in points if isinstance(value := expected.get(point), Expected)}
    if not known:
        return [default, *(point for point in points if point != default)]
    best = Expected(min(v.forward for v in known.values()), min(v.backward for v in known.values()))
    chosen = [
        point
        for point, value in known.items()
        if value.forward <= PROMISING * best.forward or value.backward <= PROMISING * best.backward
    ]
    chosen.sort(key=lambda point: known[point].forward + known[point].backward)
    return [default, *(point for point in chosen if point != default)]
