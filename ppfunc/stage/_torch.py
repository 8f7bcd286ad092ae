"""Private and unstable names of torch that the stages use, each with its purpose.

``tests/test_torch_names.py`` says which of them another torch than 2.13 has not.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from operator import attrgetter
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch._C._dynamo.guards import TensorGuards

# Modes of the key `PreDispatch`, which sees operators above autograd and autocast, need the dispatcher of
# Python.
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

# Types of dispatched operators: `OpOverload` has a schema, everything else is an operator on functions.
from torch._ops import OpOverload as OpOverload

# Tensors without values, and the errors of operators that need values.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
    DynamicOutputShapeException as DynamicOutputShapeException,
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
    UnsupportedOperatorException as UnsupportedOperatorException,
    unset_fake_temporarily,
)

# Its flag, which `profiled` reads, is set while a profiler runs, or `emit_nvtx`.
from torch.autograd import profiler

# The history of a result of an `autograd.Function` is an object of a subclass of it.
from torch.autograd.function import BackwardCFunction as BackwardCFunction

# The class of modes that the key `PreDispatch` takes.
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

# Sees every operator below autograd; `supports_higher_order_operators` is an attribute of such modes.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node as register_pytree_node

# The function by which reentrant checkpoints hide their region.
from torch.utils.checkpoint import CheckpointFunction as CheckpointFunction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

# The newest torch on which all tests have run; `.ci/versions` runs them on it.
NEWEST = (2, 15)
if tuple(map(int, torch.__version__.split(".")[:2])) > NEWEST:
    warnings.warn(
        f"torch {torch.__version__} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest with which ppfunc was"
        " tested; run its tests with it, or install an older one",
        stacklevel=2,
    )

# What function modes see where a stage assigns to the data of a tensor, or to its flag.
ASSIGNS_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
SETS_REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]

# The part of a DTensor that this rank holds, without a history.
part_of = attrgetter("_local_tensor")

# Collectives as operators without effects.
FUNCTIONAL_COLLECTIVES = torch.ops._c10d_functional

# The registry of classes that are nodes of trees: `(type, flatten_fn, unflatten_fn, flatten_with_keys_fn)` of
# each.
PYTREE_NODES = SUPPORTED_NODES

# Turn autocast off, of all devices, within a `with`; one that is turned on within is on.
without_autocast: Any = torch._C._DisableAutocast


@cache
def flex_attention() -> tuple[Any, Callable[..., None]]:
    """Import the module of flex attention, and with it, since torch 2.14, sympy, which takes 0.3 s.

    Returns:
        It, and its check of devices, which it calls by name: no gradient on the CPU.
    """
    import torch.nn.attention.flex_attention as module

    return module, module._validate_device


def flex_scores(*args: Any, **options: Any) -> Any:
    """Compute flex attention by its scores as a matrix, as torch does where it is not compiled."""
    from torch._higher_order_ops.flex_attention import math_attention

    return math_attention(*args, **options)


def indexing() -> Any:
    """Let a tensor of one index take elements, within a `with`, without its value being read."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


# Leave all torch.func transforms, and all modes, within a `with`: to compute with values during a trace.
without_transforms, without_modes = temporarily_clear_interpreter_stack, _disable_current_modes

# Computes with values during a trace.
with_values = unset_fake_temporarily

# Raises where one of the values of a tensor is false: what the checks of torch come to.
check_values = torch._check_tensor_all_with


class PreDispatchMode(ProxyTorchDispatchMode):
    """Sees every operator before autograd and autocast do: dropout and attention are one operator."""

    def __init__(self) -> None:
        no_tracer: Any = None
        super().__init__(no_tracer, "fake", pre_dispatch=True)


def saved_tensor_hooks() -> Any:
    """Return the innermost hooks on saved tensors, if there are any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


# Name of the logger that prints errors of fake evaluation with their whole traceback.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"


# The innermost torch.func transform, None outside of all; whether a tensor is wrapped by one; and what it
# wraps.
transforming = torch._C._functorch.peek_interpreter_stack
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
unwrapped = torch._C._functorch.get_unwrapped


def transforms() -> set[str]:
    """Name the kinds of the torch.func transforms around: ``"Grad"``, ``"Jvp"``, ``"Vmap"``."""
    return {layer.key().name for layer in torch._C._functorch.get_interpreter_stack() or ()}


# How many modes see the operators, and the functions, that Python calls.
operator_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack

# The function modes themselves, from the outermost on; and none of them, within a `with`.
mode_stack = torch.overrides._get_current_function_mode_stack
without_function_modes = torch._C.DisableTorchFunction

# The hooks that torch calls at every module, by number.
HOOKS_OF_ALL_MODULES = (
    torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks,
)  # fmt: skip

# Whether kernels are switched on among which operators choose when they are called.
KERNEL_SWITCHES = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_mkldnn_enabled,
)

# Whether operators may call oneDNN, and a way to change it that warns of nothing.
onednn_enabled, switch_onednn = torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled

# Fail where a tensor is zero, on a device when it is reached.
assert_async = torch._assert_async

# Whether autocast is on for any kind of device.
any_autocast = torch._C._is_any_autocast_enabled

# Add lists of tensors in few kernels; it writes into the first list.
add_into_each = torch._foreach_add_

# Arguments, results and aliases of an operator; and the function that calls it without the checks of
# `OpOverload.__call__`.
schema = attrgetter("_schema")
binding = attrgetter("_op")

# The device of a tensor without values, and the operator by which torch asks for it: half of all calls.
device_of = attrgetter("fake_device")
ASKS_DEVICE = torch.ops.prim.device.default


# The class of the `autograd.Function` that made a history.
function_of = attrgetter("_forward_cls")


def has_kernel(operator: OpOverload, device: torch.device) -> bool:
    """Tell whether an operator has a kernel of its own on a device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        operator.name(), torch._C._dispatch_key_for_device(device.type)
    )


def guards(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a check that its arguments are distinct tensors of these forms. It keeps none alive."""
    shapes: list[Any] = [list(t.shape) for t in tensors]  # the stubs expect one list alone
    strides: list[Any] = [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


def shape_env() -> Any:
    """Make the environment of sizes that are symbols; it notes every decision by such a size."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv(duck_shape=False)


def size_symbol(env: Any, size: int, name: str) -> torch.SymInt:
    """Return a new symbol for a size, of at least 2, that decides as ``size`` does."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    made = env.create_symbol(size, source, DimDynamic.DYNAMIC, None)
    return env.create_symintnode(made, hint=size, source=source)


def estimate(number: Any) -> Any:
    """Return the number for which a symbolic one stood in the trace, without deciding anything by it."""
    return number.node.hint if isinstance(number, torch.SymInt | torch.SymFloat) else number


# What a symbolic number is, in symbols: hashable, equal only for what is always equal.
expression = attrgetter("node.expr")


def version(tensor: torch.Tensor) -> int | None:
    """Count the writes into a tensor.

    Returns:
        None for an inference tensor, whose writes torch does not count.
    """
    return None if tensor.is_inference() else tensor._version


def versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return the version of every tensor."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # of an inference tensor
        return list(map(version, tensors))


def dtensor(
    part: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    strides: tuple[int, ...],
) -> DTensor:
    """Make a DTensor of this part, without a history, in a tenth of the time of ``DTensor.from_local``."""
    # Equal meshes may have other groups: a mesh that is made again after a failure equals the one before.
    spec = _spec(id(mesh), mesh, placements, shape, strides, part.dtype)
    return dtensor_class()(part, spec, requires_grad=False)


def dtensor_class() -> Any:
    """Return the class DTensor; an empty tuple, of which nothing is an instance, before its module is loaded.

    The module takes half as long to import as torch.
    """
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Tell whether a tensor is a DTensor, without importing the class."""
    return isinstance(tensor, dtensor_class())


def strided_shard(axis: int, split_factor: int) -> Placement:
    """Return the placement of a tensor that two meshes in one have cut along the same axis."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(axis, split_factor=split_factor)


@cache
def load_collectives() -> None:
    """Import the module that registers the shapes of functional collectives."""
    from torch.distributed import _functional_collectives  # noqa: F401


@cache
def load_tracer() -> None:
    """Import the tracer of torch, the module that the first FakeTensorMode imports, which takes seconds.

    Called before ranks wait for each other: in a step, each would wait until the slowest has imported it.
    """
    import torch._dynamo  # noqa: F401


@lru_cache(4096)
def _spec(
    identity: int,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, strides, dtype))


def inductor() -> Any:
    """Import the compiler of graphs, which takes a second.

    Returns:
        ``compile_fx``, its ``decompositions``, its ``lowerings``, ``make_fallback``, and ``ShapeEnv``.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings, make_fallback
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return compile_fx, decompositions, lowerings, make_fallback, ShapeEnv


def vector_options() -> dict[str, bool]:
    """Return the option of inductor that leaves out its trial whether torch and the compiler have AVX512.

    It compiles three programs, for 9 s, and loads them in each process. Where kernels of torch run with it,
    both have: every compiler of C++20 does. What is beyond is still tried. What the user has decided stays.
    """
    from torch._inductor import config

    known = torch.backends.cpu.get_cpu_capability() == "AVX512" and config.cpp.vec_isa_ok is None
    return {"cpp.vec_isa_ok": True} if known else {}


def jvp(*args: Any, **keywords: Any) -> Any:
    """Call :func:`torch.func.jvp`, without torch 2.14's warning that its own scripts are deprecated.

    Where an operator raises without values, frames of torch hold guards of its dispatch (``quantile``, torch
    2.13). They are let go of at once, and what they set is undone: later they would switch off autograd.
    """
    _load_forward_derivatives()
    with torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    ):
        try:
            return torch.func.jvp(*args, **keywords)
        except Exception as error:
            clear_frames(error.__traceback__)
            raise


@cache
def _load_forward_derivatives() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._decomp import decompositions_for_jvp  # noqa: F401


def storage(tensor: torch.Tensor) -> int | None:
    """Identify the memory of a living tensor.

    Returns:
        None for a sparse tensor, and for a tensor that a transform wraps.
    """
    if is_dtensor(tensor):
        tensor = part_of(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def address(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; of one without values, a number of its own."""
    memory = tensor.untyped_storage()
    return memory._cdata if isinstance(tensor, FakeTensor) else memory.data_ptr()


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor without the transforms that wrap it, with all rows where one maps it.

    >>> torch.func.vmap(lambda x: x + values(x).sum())(torch.ones(2))
    tensor([3., 3.])
    """
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor


def history_number() -> int:
    """Return the number of the operator that autograd has seen last in this thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number - 1


def reversed_call() -> tuple[int | None, bool]:
    """Return the number of the operator whose gradient runs now, and whether it is a Function of ours.

    The number is None outside of a backward.
    """
    node: Any = torch._C._current_autograd_node()
    ours = isinstance(node, BackwardCFunction) and function_of(node).__module__.startswith("ppfunc.")
    return None if node is None else node._sequence_nr(), ours


def profiled() -> bool:
    """Tell whether a profiler of torch runs in this process, or ``emit_nvtx``; no call of torch is made."""
    return profiler._is_profiler_enabled


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or a copy of a functional collective's result that has waited."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    return tensor.clone() if isinstance(tensor, getattr(collectives, "AsyncCollectiveTensor", ())) else tensor
