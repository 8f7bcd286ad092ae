"""Choose what the backward computes again so that a forward keeps at most so many bytes."""

import math
from collections.abc import Callable

from torch.fx import Node

from ...errors import StageError
from .again import repeatable, work_of
from .cut import ProgramBlocks, cut, early_nodes, parameter_views, residual_bytes
from .graph import base, bytes_of, is_dense, is_tensor
from .joint import Joint

_HALVINGS = 20  # of the range of prices


def within(joint: Joint, budget: int, name: str) -> ProgramBlocks:
    """Find the cheapest cut that keeps at most ``budget`` bytes.

    For a price per byte, the set that is best to compute again is a minimum cut; the price is raised until
    the bytes fit.

    Args:
        joint: the trace.
        budget: bytes, without those of parameters.
        name: of the stage, for errors.

    Raises:
        StageError: even with everything computed again more bytes are kept than allowed.

    References:
        He and Yu, Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware, MLSys 2023.
    """
    blocks = cut(joint)
    if residual_bytes(joint, blocks.residuals, name) <= budget:
        return blocks
    repeated = _chooser(joint)
    least = cut(joint, repeated(1e6))
    size = residual_bytes(joint, least.residuals, name)
    if size > budget:
        raise StageError(
            name,
            f"it may keep {budget} bytes, but needs {size} with everything computed again",
            "allow more, or split the stage",
        )
    low, high, best = -6.0, 6.0, least
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        blocks = cut(joint, repeated(10.0**middle))
        if residual_bytes(joint, blocks.residuals, name) <= budget:
            high, best = middle, blocks
        else:
            low = middle
    return best


def _chooser(joint: Joint) -> Callable[[float], set[Node]]:
    """Make a function that chooses the nodes to compute again at a price, in work per kept byte.

    In the flow network every node is a pair of vertices. Cutting ``in -> out`` keeps the result, at the price
    of its bytes. Leaving ``in`` on the side of the backward computes it again, at the price of its work, for
    which all it needs must be there.
    """
    import networkx as nx  # takes as long to import as the rest of this package
    from networkx.algorithms.flow import boykov_kolmogorov

    calls, free = repeatable(joint), parameter_views(joint) | set(joint.params)
    early = early_nodes(joint)
    nodes, demands = [n for n in joint.graph.nodes if n in early], cut(joint).residuals

    def price_of(node: Node, price: float) -> float:
        if node in free:
            return 0.0
        owns_memory = is_tensor(node) and base(node) is None and is_dense(node)
        return price * bytes_of(node) if owns_memory else math.inf

    def repeated(price: float) -> set[Node]:
        network = nx.DiGraph()
        for position, node in enumerate(nodes):
            # What is kept from the beginning is kept longest. The small difference in price also
            # lets equal layers be told apart: without it all of them are repeated, or none.
            network.add_edge(
                (node, "in"),
                (node, "out"),
                capacity=price_of(node, price * (1.1 - 0.1 * position / len(nodes))),
            )
            network.add_edge("forward", (node, "in"), capacity=work_of(node) if node in calls else math.inf)
            network.add_edges_from(((argument, "out"), (node, "in")) for argument in node.all_input_nodes)
        network.add_edges_from(((node, "out"), "backward") for node in demands)
        _, (_, side) = nx.minimum_cut(network, "forward", "backward", flow_func=boykov_kolmogorov)
        return {n for n in calls if (n, "in") in side}

    return repeated
