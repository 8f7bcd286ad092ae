"""Train ordinary modules over three axes of processes.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 examples/train_3d.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import ppfunc as pp

WIDTH, ROWS, STEPS = 32, 64, 40


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
torch.manual_seed(0)  # the same parameters and the same data on every rank
plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
stages = [pp.parallelize(nn.Sequential(Block(), Block()), mesh["tp"], plan) for _ in range(2)]
schedule = pp.one_f_one_b(ranks=2, microbatches=4)
rate = pp.optim.warmup_cosine(peak=1e-2, warmup=5, steps=STEPS)
optimizer = pp.optim.chain(pp.optim.clip_by_global_norm(1.0), pp.optim.adamw(rate))
transport = pp.P2P(mesh=mesh, axes=pp.Axes(pipe="pp", data="dp", model="tp"), shard="optimizer")
functions = [stage.fn for stage in stages]
with pp.Trainer(functions, nn.functional.mse_loss, schedule, optimizer, transport) as trainer:
    state = trainer.init({s: stages[s].params for s in schedule.model_stages_of(mesh.get_local_rank("pp"))})
    for step in range(STEPS):
        x = torch.randn(2, ROWS, WIDTH)[mesh.get_local_rank("dp")]
        state, metrics = trainer.step(state, x, x.roll(1, dims=1))
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {metrics.loss:.4f}, norm {metrics.grad_norm:.3f}")
dist.destroy_process_group()
