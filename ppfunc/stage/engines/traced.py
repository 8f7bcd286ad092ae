"""Make the programs of the graph engine: trace a stage, clean the trace, cut it, write its parts."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

from torch.fx import Node, map_arg

from .._torch import any_autocast, estimate, expression, without_autocast
from ..abstract.sizes import Numbers
from ..errors import StageError
from ..program import Example, FlatProgram
from ..signature import differentiable, leaf_names
from .differentiable import DifferentiableStage, engine
from .tracing.again import Remat, cut_for
from .tracing.budget import within
from .tracing.clean import clean, skip_copies
from .tracing.compiled import without_onednn
from .tracing.cut import Block, ProgramBlocks, residual_bytes
from .tracing.emit import Recipe, TracedFunction
from .tracing.graph import ancestors, base, is_dense, is_post, is_tensor, root
from .tracing.interleave import posted_early
from .tracing.joint import Joint, trace


@engine
def traced(
    stage: DifferentiableStage,
    _: tuple[Any, ...],
    *,
    remat: Remat,
    compile: bool,
    cuda_graphs: bool,
    dynamic: bool,
) -> tuple[FlatProgram, int]:
    """Trace a stage, and cut its trace in programs. Whoever varies sizes asks for ``dynamic=False``."""
    if dynamic:
        raise ValueError(
            "graph(dynamic=True) was called for one example, whose program has one size; leave it out, or"
            " give engine=graph(dynamic=True) itself, not a function that calls it, to a step function"
        )
    name, outline, example = stage.name, stage.outline, stage.example
    if cuda_graphs and example.device.type != "cuda":
        reason = f"it computes on the device {example.device}, and CUDA graphs are for CUDA alone"
        raise StageError(name, reason, "put its parameters on a CUDA device, or leave out cuda_graphs=True")
    if outline.untraced:
        raise StageError(name, *outline.untraced)
    with without_onednn() if compile else nullcontext():
        joint = trace(stage)
        if example.symbols:
            numbers = Numbers({expression(size): estimate(size) for size in example.symbols})
            of_sizes, known = numbers((example, outline))
            static = DifferentiableStage(stage.fn, of_sizes, known, stage.has_aux, name)
            _require_same(joint, trace(static), numbers, name)
    clean(joint)
    if any_autocast():
        for node in joint.graph.nodes:  # its casts are operators of the trace
            node.meta["within"] = without_autocast
    if isinstance(remat, int) and not isinstance(remat, bool):
        blocks = within(joint, remat, name)
    else:
        blocks = cut_for(joint, remat, name, leaf_names(example.params))
    size = residual_bytes(joint, blocks.residuals, name)
    flat = _emit(blocks, joint, name, compile, _warning_of(_unread(joint, example), name))
    if not cuda_graphs:
        return flat, size
    from .captured import captured

    return captured(flat, example, outline.y), size


def _require_same(symbolic: Joint, joint: Joint, numbers: Numbers, name: str) -> None:
    """Raise StageError where a trace with numbers in the place of its symbols is not the one for these sizes.

    A stage may look at a size as at something else than a number: at its text, or at its type.
    """
    skip_copies(symbolic)  # where a size is a symbol, torch also takes a slice of all
    skip_copies(joint)
    for one, two in zip_longest(_written(symbolic, numbers), _written(joint, numbers)):
        if one != two:
            (with_symbols, _), (call, place) = one or ("nothing", ""), two or ("nothing", "")
            reason = f"it calls {call}{place}, and {with_symbols} where its sizes are symbols"
            raise StageError(name, reason, "use sizes as numbers alone")


def _written(joint: Joint, numbers: Numbers) -> Iterator[tuple[str, str]]:
    """Write each call that is no view, and yield the user's line. Of a view, what it comes to is written."""
    names: dict[Node, int] = {}

    def argument(node: Node) -> str:
        value, text = node.meta["val"], f"%{names[root(node)]}"
        if not (is_tensor(node) and is_dense(node)):
            return text
        axes = zip(*numbers((tuple(value.shape), value.stride())), strict=True)
        return f"{text}{[axis for axis in axes if axis[0] != 1]} + {numbers(value.storage_offset())}"

    for node in joint.graph.nodes:
        if base(node) is None and (node.users or node.op != "call_function"):
            names[node] = len(names)
            text = f"{node.target} {map_arg(numbers((node.args, node.kwargs)), argument)}"
            yield f"{text} {node.meta.get('constant', '')}", node.meta.get("place", "")


def _emit(blocks: ProgramBlocks, joint: Joint, name: str, compile: bool, warning: str) -> FlatProgram:
    def make(
        block: Block, function: str, names: tuple[str, ...], settle: tuple[str, ...] = (), warning: str = ""
    ) -> Callable[..., Any]:
        if any(map(is_post, block.body)):
            block = block._replace(body=posted_early(block.body))
        return TracedFunction(Recipe(block, names, f"{name} {function}", settle, compile, warning))

    return FlatProgram(
        make(blocks.forward, "forward", ("params", "x", "extras"), ("x", "extras")),
        make(blocks.backward, "backward", ("residuals", "gy"), ("gy",), warning),
        make(blocks.backward_input, "backward_input", ("residuals", "gy"), ("gy",)),
        make(blocks.backward_weight, "backward_weight", ("rest",), (), warning),
    )


def _unread(joint: Joint, example: Example) -> list[str]:
    """List the differentiable parameters on which no output depends.

    A frozen one is used, and gets zeros on purpose.
    """
    used, leaves = (
        ancestors(joint.results[0]),
        zip(joint.params, example.params.leaves, example.params.paths, strict=True),
    )
    return [f"params{path}" for node, leaf, path in leaves if differentiable(leaf.dtype) and node not in used]


def _warning_of(unread: list[str], name: str) -> str:
    """Word the warning of a backward that computes nothing for these parameters.

    For another form of inputs there is another program.
    """
    if not unread:
        return ""
    more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
    return (
        f"{name}: nothing depends on {', '.join(unread[:3])}{more} for such inputs, so the gradient is zero;"
        " use it, or leave it out"
    )
