"""torch.func from outside: a pipeline is a function, and can be differentiated and vectorised as one.

    python examples/outside.py

In one process a step under ``torch.func.grad``, ``vmap``, ``jvp`` or ``jacrev`` is what the
transform makes of any function; the schedule decides only the order of the work. Between processes
a transform would end at each message, and is refused: there, transform the stages (``pp.jvp``,
``pp.hvp``, ``pp.ensemble``).
"""

from __future__ import annotations

import torch
from small import MICROBATCHES, STAGES, batch, disagreement, loss_fn, model, parameters, stage, total_loss
from torch.func import grad, hessian, jacrev, vmap

import ppfunc as pp


def main() -> float:
    torch.set_num_threads(1)
    params, (inputs, targets) = parameters(), batch()
    schedule = pp.zb_h1(ranks=STAGES, microbatches=MICROBATCHES)
    step = pp.value_and_grad([stage] * STAGES, loss_fn, schedule, engine=pp.engines.functional)
    outputs = pp.evaluate([stage] * STAGES, None, schedule, engine=pp.engines.functional, return_outputs=True)
    direct = total_loss(inputs, targets)
    found = {}

    # grad: of the loss of the step, past the gradients that the step itself computes.
    got = grad(lambda p: step(p, inputs, targets)[0])(params)
    found["grad of the loss"] = disagreement(got, grad(direct)(params))

    # vmap: the gradients of the step for several batches at once.
    batches = torch.stack([inputs, inputs.sin(), inputs.cos()])
    got = vmap(lambda x: step(params, x, targets)[1])(batches)
    want = vmap(lambda x: grad(total_loss(x, targets))(params))(batches)
    found["vmap of the gradients"] = disagreement(got, want)

    # jacrev: of the gradients, which makes rows of the Hessian; of the outputs in the inputs.
    def with_bias(b: torch.Tensor) -> dict:
        return {**params, 0: {**params[0], "b": b}}

    got = jacrev(lambda b: step(with_bias(b), inputs, targets)[1][0]["b"])(params[0]["b"])
    found["jacrev of the gradients"] = disagreement(
        got, hessian(lambda b: direct(with_bias(b)))(params[0]["b"])
    )
    got = jacrev(lambda x: outputs(params, x).sum(0))(inputs)
    found["jacrev of the outputs"] = disagreement(got, jacrev(lambda x: model(params, x).sum(0))(inputs))

    for what, error in found.items():
        print(f"{what}: largest disagreement with the same of the whole model {error:.1e}")
    return max(found.values())


if __name__ == "__main__":
    main()
