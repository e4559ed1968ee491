"""Megatron's distributed optimizer over torch's own Adam.

Without Transformer Engine and Apex, Megatron Core 0.19.2 trains with torch's Adam, and its distributed optimizer saves
such a state correctly but cannot load it: it asks an optimizer that has not stepped yet for its step, looks the step up
among the tensors of a checkpoint that keeps it elsewhere, and shares one step tensor between all parameters, so that
each step would count once for every parameter. These stand-ins mend the three.
"""

from collections.abc import Callable
from typing import Any

import torch


def sharded_state_dict(
    original: Callable[..., Any], optimizer: Any, model_state: Any, is_loading: bool = False, **kwargs: Any
) -> Any:
    """``DistributedOptimizer.sharded_state_dict`` that gives Adam its (zero) state before a load."""
    if is_loading and isinstance(optimizer.optimizer, torch.optim.Adam):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
    return original(optimizer, model_state, is_loading, **kwargs)


def set_parameter_state(original: Callable[..., Any], optimizer: Any, parameter: Any, tensors: dict[str, Any]) -> Any:
    """``DistributedOptimizer._set_main_param_and_optimizer_states`` that leaves each parameter a step of its own."""
    group, order = optimizer.model_param_group_index_map[parameter]
    state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
    if torch.is_tensor(state.get("step")):
        state["step"] = state["step"].clone()
        tensors = {"step": None, **tensors}
    return original(optimizer, parameter, tensors)
