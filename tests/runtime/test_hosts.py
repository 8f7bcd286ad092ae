"""Ranks on several hosts, whose links are slow, lossy, or cut for a while: network namespaces on one machine.

Needs root and ``ip``, and ``tc`` with netem for loss and delay. Each rank is a process that enters a
namespace of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist

import ppfunc as pp
from tests.forks import forked

LIMIT = 30.0  # seconds
_NETWORK = 0x40000000  # CLONE_NEWNET


def run(*command):
    return subprocess.run(command, check=False, capture_output=True, text=True).returncode == 0


@cache
def has_namespaces():
    """Tell whether namespaces and virtual links can be made."""
    name = f"pp{os.getpid()}"
    if os.geteuid() or not shutil.which("ip") or not run("ip", "netns", "add", name):
        return False
    try:
        made = ("link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        return run("ip", "-n", name, *made) and run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
    finally:
        run("ip", "netns", "del", name)


class Hosts:
    """Hosts on one bridge, and a process of a rank on each."""

    def __init__(self, size, folder):
        self.size, self.folder, self.tag = size, folder, f"p{os.getpid() % 10_000}"
        self.bridge = f"{self.tag}b"
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "link", "set", self.bridge, "up")
        for rank in range(size):
            name, link = self.name(rank), self.link(rank)
            run("ip", "netns", "add", name)
            run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", link, "master", self.bridge, "up")
            for command in (
                ("addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                run("ip", "-n", name, *command)
        self.processes = []

    def name(self, rank):
        return f"{self.tag}n{rank}"

    def link(self, rank):
        return f"{self.tag}v{rank}"

    def start(self, limit, steps):
        """Start the ranks; each makes the group, and goes on when :meth:`go` is called."""
        for rank in range(self.size):
            arguments = self.name(rank), rank, self.size, limit, steps, self.folder
            self.processes.append(forked().Process(target=work, args=arguments, daemon=True))
            self.processes[-1].start()
        self.wait_for("grouped")

    def wait_for(self, what, count=1):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            texts = [self.folder / f"{what}-{rank}" for rank in range(self.size)]
            if all(path.exists() and int(path.read_text() or 0) >= count for path in texts):
                return
            time.sleep(0.02)
        raise TimeoutError(f"not all ranks have {what}")

    def go(self):
        (self.folder / "go").touch()

    def impair(self, rank, *how):
        """Delay or lose what a host sends and receives; skip the test where the kernel cannot."""
        ways = ("-n", self.name(rank), "dev", "eth0"), ("dev", self.link(rank))
        for way in ways:
            within, device = way[:-2], way[-2:]
            if not run("tc", *within, "qdisc", "replace", *device, "root", "netem", *how):
                pytest.skip("no tc, or no netem in the kernel")

    def mend(self, rank):
        run("tc", "-n", self.name(rank), "qdisc", "del", "dev", "eth0", "root")
        run("tc", "qdisc", "del", "dev", self.link(rank), "root")

    def cut(self, rank, seconds=None, one_way=False):
        """Cut a host off; with ``one_way`` what it sends to host 0 is lost, and all that it receives
        arrives.
        """
        if one_way:
            lost = ("10.77.0.1", "lladdr", "02:00:00:00:00:77", "dev", "eth0", "nud", "permanent")
            assert run("ip", "-n", self.name(rank), "neigh", "replace", *lost)
        else:
            assert run("ip", "link", "set", self.link(rank), "down")
        if seconds is not None:
            time.sleep(seconds)
            run("ip", "-n", self.name(rank), "neigh", "del", "10.77.0.1", "dev", "eth0")
            run("ip", "link", "set", self.link(rank), "up")

    def answers(self, seconds):
        """What each rank has seen: the type and text of an error, the rank that it names, and the steps that
        ended.
        """
        for process in self.processes:
            process.join(seconds)
        return [json.loads((self.folder / f"seen-{rank}").read_text()) for rank in range(self.size)]

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        for rank in range(self.size):
            run("ip", "netns", "del", self.name(rank))
            run("ip", "link", "del", self.link(rank))
        run("ip", "link", "del", self.bridge)


@pytest.fixture
def hosts(tmp_path):
    if not has_namespaces():
        pytest.skip("no root, or no ip that makes namespaces")
    made = []

    def make(size):
        made.append(Hosts(size, tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()


def require_all_steps(hosts, steps, seconds=90.0):
    assert hosts.answers(seconds) == [[None, "", None, steps]] * hosts.size


@pytest.mark.parametrize("impairment", [("loss", "5%"), ("loss", "20%"), ("delay", "1200ms")], ids=" ".join)
def test_ranks_meet_over_a_link_that_loses_or_delays(hosts, impairment):
    """They gave up after 2 to 3 s whatever the limit, and named a living rank."""
    ranks = hosts(2)
    ranks.start(60.0, 3)
    ranks.impair(1, *impairment)
    ranks.go()
    ranks.wait_for("met")
    ranks.mend(1)
    (ranks.folder / "step").touch()
    require_all_steps(ranks, 3)


@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_meet_after_a_cut_of_the_store_or_of_a_rank(hosts, victim):
    ranks = hosts(3)
    ranks.start(LIMIT, 3)
    ranks.go()
    ranks.cut(victim, 5)
    ranks.wait_for("met")
    (ranks.folder / "step").touch()
    require_all_steps(ranks, 3)


@pytest.mark.parametrize(
    ("seconds", "one_way"),
    [
        (1, False),
        (5, True),
        pytest.param(12, False, marks=pytest.mark.slow),
        pytest.param(20, False, marks=[pytest.mark.slow, pytest.mark.large]),
    ],
)
def test_a_cut_within_the_limit_raises_nothing(hosts, seconds, one_way):
    """The link was taken for dead after 7 to 10 s."""
    ranks = hosts(2)
    (ranks.folder / "step").touch()
    ranks.start(60.0, 100_000)
    ranks.go()
    ranks.wait_for("stepped", 5)
    ranks.cut(1, seconds, one_way)
    steps = int((ranks.folder / "stepped-0").read_text()) + 200
    (ranks.folder / "enough.new").write_text(str(steps))
    (ranks.folder / "enough.new").rename(ranks.folder / "enough")
    require_all_steps(ranks, steps)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_cut_beyond_the_limit_is_one_of_the_link(hosts, victim):
    ranks = hosts(2)
    (ranks.folder / "step").touch()
    ranks.start(8.0, 100_000)
    ranks.go()
    ranks.wait_for("stepped", 5)
    ranks.cut(victim)
    began = time.monotonic()
    for rank, (name, text, named, _) in enumerate(ranks.answers(60)):
        assert (name, named) == ("PipelineError", 1 - rank) and "the link between" in text, (rank, text)
    assert time.monotonic() - began > 6.0


def enter(namespace):
    """Have what this process opens from now on be of a namespace."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"no namespace {namespace}")


def work(namespace, rank, size, limit, steps, folder):
    """One rank: enter its host; make the group; meet; step."""
    enter(namespace)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)

    def note(what, count=1):
        path = folder / f"{what}-{rank}"
        path.with_suffix(".new").write_text(str(count))
        path.with_suffix(".new").rename(path)

    def wait_for(name):
        while not (folder / name).exists():
            time.sleep(0.01)

    dist.init_process_group("gloo", init_method="tcp://10.77.0.1:29500", rank=rank, world_size=size)
    dist.barrier()
    note("grouped")
    wait_for("go")
    ended, seen = 0, (None, "", None)
    try:
        transport = pp.P2P(timeout=limit, mapped=False)  # these hosts share their memory
        transport.require_same("met")
        note("met")
        wait_for("step")
        params, x = {rank: torch.ones(2, 2)}, torch.ones(4, 2)
        stages = [lambda w, x: x @ w] * size
        step = pp.value_and_grad(stages, lambda y, t: (y - t).square().mean(), pp.gpipe(size, 2), transport)
        while ended < steps:
            step(params, x, x)
            ended += 1
            if ended % 5 == 0:
                note("stepped", ended)
                time.sleep(0.01)
            if (folder / "enough").exists():
                steps = int((folder / "enough").read_text())
    except Exception as error:
        seen = type(error).__name__, str(error), getattr(error, "rank", None)
    (folder / f"seen-{rank}").write_text(json.dumps([*seen, ended]))
    os._exit(0)  # whatever the links are like
