"""The one table of names that CPU host mode replaces, checked against Megatron Core 0.19.2 and torch 2.11.

An entry names a module, an attribute of it (dotted for a class attribute), the stand-in and the reason. A stand-in that
wraps the original takes it as its first argument (``wraps=True``). Nothing outside this table is patched.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mok_megatron.host import torch_adam

CPU = torch.device("cpu")


class HostStream:
    """Stand-in for ``torch.cuda.Stream``: CPU work runs in program order, so there is nothing to order or wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> "HostEvent":
        return event if event is not None else HostEvent()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class HostEvent:
    """Stand-in for ``torch.cuda.Event``: always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


THE_STREAM = HostStream()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand-in for a call that only waits for, or tidies up, a device."""


def _is_cuda(device: Any) -> bool:
    """True for ``"cuda"``, ``"cuda:N"`` and ``torch.device("cuda", N)``."""
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _cuda_means_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``original`` with any CUDA device argument replaced by the CPU."""
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = CPU
    return original(*args, **kwargs)


def _to(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.to``, whose device may also be its first positional argument."""
    if args and _is_cuda(args[0]):
        args = (CPU, *args[1:])
    return _cuda_means_cpu(original, tensor, *args, **kwargs)


def _same_tensor(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand-in for ``Tensor.cuda``."""
    return tensor


def _type(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.type()`` as a CUDA tensor of that dtype would answer; a conversion goes through unchanged."""
    answer = original(tensor, *args, **kwargs)
    if isinstance(answer, str) and answer.startswith("torch.") and not answer.startswith("torch.cuda."):
        return "torch.cuda." + answer.removeprefix("torch.")
    return answer


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """State of the CPU's default generator."""
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Set the state of the CPU's default generator."""
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    """Seed the CPU's default generator."""
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def _fork(original: Callable[..., Any], tracker: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """``CudaRNGStatesTracker.fork`` without its check that the CPU generator stood still.

    The tracked generator *is* the CPU generator here, so the original would warn on every use.
    """
    names = args or tuple(kwargs.values())
    name = names[0] if names else "model-parallel-rng"
    if name not in tracker.states_:
        raise KeyError(f"random-number state {name!r} was never added to Megatron's tracker")
    outer_name, outer_state = tracker._current_state_name, torch.get_rng_state()
    if outer_name != "default-rng":
        tracker.states_[outer_name] = outer_state
    torch.set_rng_state(tracker.states_[name])
    tracker._current_state_name = name
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(tracker.states_.get(outer_name, outer_state))
        tracker._current_state_name = outer_name


def _splits_as_numpy(
    original: Callable[..., Any], tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """``maybe_move_tensor_to_cpu``, which converts to numpy only what it moves off a GPU."""
    if as_numpy and torch.is_tensor(tensor):
        return tensor.cpu().numpy()
    return tensor


def _average_by_sum(original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``torch.distributed.all_reduce`` whose average is a sum and a division (synchronous calls only)."""
    if kwargs.get("op") == torch.distributed.ReduceOp.AVG and not kwargs.get("async_op", False):
        kwargs["op"] = torch.distributed.ReduceOp.SUM
        original(tensor, *args, **kwargs)
        group = kwargs.get("group", args[1] if len(args) > 1 else None)
        tensor.div_(torch.distributed.get_world_size(group))
        return None
    return original(tensor, *args, **kwargs)


def _without_cuda(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``initialize_megatron`` that does not insist on a GPU."""
    return original(*args, **{"allow_no_cuda": True, **kwargs})


@dataclass(frozen=True)
class Replacement:
    """One replaced name.

    Attributes:
        module: module that holds the name, imported when host mode starts.
        name: attribute of the module; dotted for an attribute of a class in it.
        stand_in: what the name means on a CPU host.
        reason: why Megatron Core needs it there.
        wraps: the stand-in takes the original as its first argument.
    """

    module: str
    name: str
    stand_in: Any
    reason: str
    wraps: bool = False

    def build(self, original: Any) -> Any:
        """The object to put in place of ``original``."""
        if not self.wraps:
            return self.stand_in

        # A function and not functools.partial: a partial does not bind `self` as a class attribute.
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return self.stand_in(original, *args, **kwargs)

        return replaced


_CUDA = "torch.cuda"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_LITERAL = 'optimizer, gradient clipping, schedules and checkpointing write device="cuda"'
_RNG = "the tracked generator is the CPU's default generator"
_STREAM = "dispatchers, DDP and shared experts order work with streams and events"

REPLACEMENTS: tuple[Replacement, ...] = (
    # The current device, and waiting for it.
    Replacement(_CUDA, "current_device", lambda: CPU, "passed as device= throughout Megatron Core"),
    Replacement(_CUDA, "set_device", _nothing, "checkpoint and initialisation code selects a device"),
    Replacement(_CUDA, "synchronize", _nothing, "timers, checkpointing and pipeline sends wait for the device"),
    Replacement(_CUDA, "empty_cache", _nothing, "called after freeing buffers"),
    # Streams and events.
    Replacement(_CUDA, "Stream", HostStream, _STREAM),
    Replacement(_CUDA, "Event", HostEvent, _STREAM),
    Replacement(_CUDA, "current_stream", lambda device=None: THE_STREAM, _STREAM),
    Replacement(_CUDA, "default_stream", lambda device=None: THE_STREAM, _STREAM),
    Replacement(_CUDA, "stream", lambda stream: contextlib.nullcontext(), _STREAM),
    Replacement("torch", "Tensor.record_stream", _nothing, "the caching allocator needs it; CPU memory does not"),
    # Random-number states.
    Replacement(_CUDA, "manual_seed", _manual_seed, _RNG),
    Replacement(_CUDA, "get_rng_state", _get_rng_state, _RNG),
    Replacement(_CUDA, "set_rng_state", _set_rng_state, _RNG),
    Replacement("torch.cuda.random", "get_rng_state", _get_rng_state, _RNG),
    Replacement("torch.cuda.random", "set_rng_state", _set_rng_state, _RNG),
    Replacement("megatron.core.tensor_parallel.random", "_get_cuda_rng_state", _get_rng_state, _RNG),
    Replacement("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", _set_rng_state, _RNG),
    Replacement(
        "megatron.core.tensor_parallel.random",
        "CudaRNGStatesTracker.fork",
        _fork,
        "its check that the CPU generator stood still cannot hold",
        wraps=True,
    ),
    # Literal "cuda" devices and types.
    *(
        Replacement("torch", factory, _cuda_means_cpu, _LITERAL, wraps=True)
        for factory in ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "empty_like", "zeros_like")
    ),
    Replacement("torch", "Tensor.cuda", _same_tensor, "batches, embeddings and checkpoints call .cuda()"),
    Replacement("torch", "Tensor.to", _to, _LITERAL, wraps=True),
    Replacement(
        "torch",
        "Tensor.type",
        _type,
        "optimizers sort parameters by type strings such as torch.cuda.FloatTensor",
        wraps=True,
    ),
    # Without Transformer Engine and Apex the optimizer is torch's Adam.
    Replacement(
        _DISTRIBUTED_OPTIMIZER,
        "DistributedOptimizer.sharded_state_dict",
        torch_adam.sharded_state_dict,
        "loading needs an Adam state that exists",
        wraps=True,
    ),
    Replacement(
        _DISTRIBUTED_OPTIMIZER,
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        torch_adam.set_parameter_state,
        "loading looks for a step where torch's Adam has none, and shares one step between all parameters",
        wraps=True,
    ),
    # Collectives.
    Replacement(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _splits_as_numpy,
        "gloo takes all-to-all split sizes as integers, not tensors; on a GPU this call converts them",
        wraps=True,
    ),
    Replacement(
        "torch.distributed", "all_reduce", _average_by_sum, "gloo has no AVG, which loss logging asks for", wraps=True
    ),
)

# Needed only by Megatron's training framework (mok_megatron.pretrain), whose import takes a few seconds.
TRAINING_REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(
        _CUDA, "device_count", lambda: 1, "initialisation makes the parallel groups only where there are devices"
    ),
    Replacement(
        "megatron.training.training",
        "initialize_megatron",
        _without_cuda,
        "it stops where torch finds no GPU, unless told otherwise",
        wraps=True,
    ),
)
