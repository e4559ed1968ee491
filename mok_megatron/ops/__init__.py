"""The operator: route -> schedule -> forward -> combine. Start with `moe.py`, then `schedule.py`."""

from mok_megatron.ops.inputs import SharedExpert
from mok_megatron.ops.moe import mok_moe
from mok_megatron.ops.schedule import Schedule, build_schedule

__all__ = ["Schedule", "SharedExpert", "build_schedule", "mok_moe"]
