"""Predicted against measured: step times that follow from `profile` and `probe` alone, beside what the steps then took.

    python benchmarks/prediction.py --out runs/prediction --docs docs/prediction.md

For every number of hosts and every link rate the emulated cluster is probed once, for every task the model is profiled
once, alone. From these two files come a plan and the predictions for three plans: plain all-reduce, the chosen one, and
a worse one (a sharded server after backward). Then all three run on the emulated hosts, in turns, beside PyTorch's DDP
where the computing is real. Nothing that is measured then goes back into the prediction.

Two modes. *virtual*: layers sleep for their seconds, sockets and links are real; all hosts together then need little of
the few cores. *real*: all hosts compute on the cores that there are, and disturb one another; the probe has measured by
how much. A cell is left out, aloud, where a step would take longer than `--longest`.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from poseidon.artifact import Value
from poseidon.cluster.spec import ClusterSpec
from poseidon.comm import AllReduce, CommScheme, ShardedServer, SparseRows
from poseidon.comm.group import Group
from poseidon.errors import PoseidonError
from poseidon.launch.local import LabEngine
from poseidon.plan import Plan, uniform_plan
from poseidon.planner.search import search_plan
from poseidon.profile.graph import ModelProfile
from poseidon.profile.measure import profile_model, scale_to
from poseidon.profile.virtual import VirtualOptimizer, virtual_batch, virtual_loss, virtual_model
from poseidon.runtime.attach import Run
from poseidon.runtime.data import Shares, batches
from poseidon.runtime.join import init, shutdown
from poseidon.simulator import rates_for, simulate
from poseidon.tasks import Task, load_task
from poseidon.tasks.models import VGG19
from poseidon.units import format_seconds, parse_bandwidth

PAPER_SECONDS = 0.925
"""One step of VGG19-22K over 32 samples on the paper's GPU."""
VIRTUAL_ONLY = ("vgg19-22k",)
"""A processor would compute for minutes."""
TASKS = ("fc-heavy", "fashion-mnist", "resnet20", "gpt-mini", "recsys", "vgg19-22k")
HOSTS = (2, 4)
LINKS = ("100Mbit/s", "200Mbit/s", "1Gbit/s")
ROUNDS = {"virtual": 1, "real": 2}
"""Turns of each plan, by mode: what computes on shared cores is not the same from minute to minute."""
MOST_STEPS = 12
MOST_WARM_UP, WARM_UP_SECONDS = 10, 1.5
"""Steps before those that count: new buffers meet their memory, and the factors' exchanges learn what to expect."""
VIRTUAL_SECONDS = 0.2
"""A virtual step is stretched to at least that, so that what all hosts' hooks and threads need of the few cores beside
it stays small."""
RESULT = "result: "


class Job(Value):
    """What the ranks of one cluster are to run."""

    task: str
    mode: str
    profile: str
    """The path of the profile."""
    plans: dict[str, str]
    """Paths by name."""
    steps: dict[str, int]
    """How many count in a turn, by plan."""
    warm_up: dict[str, int]


class Row(Value):
    """One plan in one cell."""

    task: str
    mode: str
    hosts: int
    link: str
    plan: str
    predicted: float | None
    """None for DDP, which nobody predicts here."""
    measured: float
    p10: float
    p90: float
    what: str
    """The plan in words."""

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        assert self.predicted is not None
        return self.predicted / self.measured - 1.0


# Files


def profile_of(name: str, mode: str, folder: Path) -> Path:
    """Profiles a task once; what is there already is used again."""
    path = folder / f"profile-{name}-{mode}.json"
    if path.exists():
        return path
    if name in VIRTUAL_ONLY:
        _published_vgg19_22k().save(path)
        return path
    measured = folder / f"profile-{name}-real.json"
    if not measured.exists():
        _run("profile", name, "--threads", "1", "-o", str(measured))
    if mode == "virtual":
        profile = ModelProfile.load(measured)
        _as_virtual(profile).save(path)
    return path


def _as_virtual(profile: ModelProfile) -> ModelProfile:
    """The same layers on a device of their own, with nothing but forward and backward."""
    stretch = max(1.0, VIRTUAL_SECONDS / profile.seconds)
    layers = tuple(
        layer.model_copy(
            update={
                "forward_seconds": layer.forward_seconds * stretch,
                "backward_seconds": layer.backward_seconds * stretch,
                "weight_gradient_seconds": layer.weight_gradient_seconds * stretch,
            }
        )
        for layer in profile.layers
    )
    nothing = {"device": None, "loader_seconds": 0.0, "optimizer_seconds": 0.0}
    return profile.model_copy(update={"layers": layers, **nothing})


def _published_vgg19_22k() -> ModelProfile:
    with torch.device("meta"):
        model = VGG19(num_classes=21841)
        batch = torch.empty(32, 3, 224, 224), torch.empty(32, dtype=torch.long)
    profile = profile_model(model, batch, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    return scale_to(
        profile, PAPER_SECONDS, source=f"{PAPER_SECONDS}s a step as in the ATC'17 paper, spread by operations"
    )


def cluster_of(hosts: int, link: str, folder: Path) -> Path:
    """Probes an emulated cluster once."""
    path = folder / f"cluster-{hosts}x{link.replace('/', 'p')}.toml"
    if not path.exists():
        _run("probe", "--hosts", str(hosts), "--link", link, "-o", str(path))
    return path


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "poseidon", *arguments], check=True, stdout=sys.stderr)


# Plans and predictions


def plans_of(profile: ModelProfile, cluster: ClusterSpec, *, virtual: bool) -> dict[str, tuple[Plan, float]]:
    """Three plans with their predicted steps."""
    rates = rates_for(profile, cluster)
    sparse = [layer.name for layer in profile.trainable if layer.is_sparse]

    def everywhere(scheme: CommScheme) -> dict[str, CommScheme]:
        return {layer.name: SparseRows() if layer.name in sparse else scheme for layer in profile.trainable}

    # Parameters that only sleep have no memory for a server to work on, and an optimizer that nobody can run in parts.
    worse = everywhere(AllReduce() if virtual else ShardedServer())
    overrides = {"deferred": ()} if virtual else None
    plans = {
        "all_reduce": uniform_plan(profile, rates.world_size, everywhere(AllReduce())),
        "chosen": search_plan(profile, cluster, sparse=sparse, overrides=overrides),
        "worse": uniform_plan(profile, rates.world_size, worse, wait_free=False),
    }
    return {name: (plan, simulate(profile, plan, rates).step_seconds) for name, plan in plans.items()}


# On each host


class Contender:
    """A model under its plans, or under DDP, on this rank."""

    def __init__(self, job: Job, group: Group, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.group = group
        self.profile = ModelProfile.load(job.profile)
        self.plans = {name: Plan.load(path) for name, path in job.plans.items()}
        if job.mode == "virtual":
            self.model: torch.nn.Module = virtual_model(self.profile)
            self.optimizer: torch.optim.Optimizer = VirtualOptimizer(self.model.parameters())
            self.loss = virtual_loss
            self.batches: Iterator[Any] = _forever(virtual_batch(self.profile))
        else:
            task = load_task(job.task)
            self.model = task.make_model()
            self.optimizer = task.make_optimizer(self.model.parameters())
            self.loss = task.loss
            self.batches = _batches_of(task, group)
        self.run: Run | None = None
        self.wrapped: torch.nn.Module = self.model

    def take(self, name: str) -> None:
        """Goes on under another plan."""
        if self.run is None:
            self.run = Run(self.model, self.optimizer, self.plans[name], self.group)
        else:
            self.run.adopt(self.plans[name])

    def step(self) -> float:
        """Seconds of one step, from outside, the loader included."""
        start = _now()
        self.optimizer.zero_grad()
        self.loss(self.wrapped, next(self.batches)).backward()
        self.optimizer.step()
        return _now() - start

    def leave(self) -> None:
        """Takes everything back."""
        if self.run is not None:
            self.run.detach()
            self.run = None


def work(path: Path) -> None:
    """Runs the jobs one after the other; rank 0 prints what all ranks measured."""
    group = init(max_connections=4)
    try:
        for job in [Job.model_validate(one) for one in json.loads(path.read_text())]:
            seconds = _race(job, group)
            if group.rank == 0:
                print(RESULT + json.dumps({"task": job.task, "mode": job.mode, "seconds": seconds}), flush=True)
            gc.collect()
    except PoseidonError as error:
        shutdown(str(error))
        raise
    shutdown()


def _race(job: Job, group: Group) -> dict[str, list[float]]:
    """Seconds of the steps that count, by plan, each the mean over ranks."""
    seconds: dict[str, list[float]] = {name: [] for name in job.plans}
    ours = Contender(job, group)
    theirs = None
    if job.mode == "real":
        seconds["ddp"] = []
        theirs = Contender(job, group)
        theirs.wrapped = DistributedDataParallel(theirs.model, init_sync=False)
    for _ in range(ROUNDS[job.mode]):
        for name in seconds:
            contender = theirs if name == "ddp" and theirs is not None else ours
            if contender is ours:
                ours.take(name)
            group.barrier()
            as_for = "all_reduce" if name == "ddp" else name
            taken = [contender.step() for _ in range(job.warm_up[as_for] + job.steps[as_for])]
            everyone = [json.loads(t) for t in group.all_gather_text(json.dumps(taken[job.warm_up[as_for] :]))]
            seconds[name] += [statistics.fmean(step) for step in zip(*everyone, strict=True)]
    ours.leave()
    return seconds


def _batches_of(task: Task, group: Group) -> Iterator[Any]:
    data = task.make_train_data()
    shares = Shares(
        num_samples=len(data), rank=group.rank, world_size=group.world_size, local_batch_size=task.batch_size, seed=0
    )
    epoch = 0
    while True:
        for share, batch in batches(data, shares.epoch(epoch), collate=task.collate):
            if len(share.indices) == task.batch_size:
                yield batch
        epoch += 1


def _forever(batch: torch.Tensor) -> Iterator[torch.Tensor]:
    while True:
        yield batch


def _now() -> float:
    return time.perf_counter()


# On the machine that emulates them


def jobs_of(given: argparse.Namespace, hosts: int, link: str) -> tuple[list[Job], dict[tuple[str, str, str], Any]]:
    """What to run on one cluster, with the predictions by task, mode and plan."""
    folder: Path = given.out
    cluster = ClusterSpec.load(cluster_of(hosts, link, folder))
    jobs, predictions = [], {}
    for mode, name in product(given.modes, given.tasks):
        if mode == "real" and name in VIRTUAL_ONLY:
            continue
        path = profile_of(name, mode, folder)
        profile = ModelProfile.load(path)
        kept, steps, warm_up = {}, {}, {}
        for plan_name, (plan, predicted) in plans_of(profile, cluster, virtual=mode == "virtual").items():
            if predicted > given.longest:
                print(f"left out: {name}, {mode}, {hosts} x {link}, {plan_name}: {format_seconds(predicted)} a step")
                continue
            plan_path = folder / f"plan-{name}-{mode}-{hosts}x{link.replace('/', 'p')}-{plan_name}.json"
            plan.save(plan_path)
            kept[plan_name] = str(plan_path)
            steps[plan_name] = int(min(MOST_STEPS, max(1, given.budget / ROUNDS[mode] / predicted)))
            warm_up[plan_name] = int(min(MOST_WARM_UP, max(1, WARM_UP_SECONDS / predicted)))
            predictions[name, mode, plan_name] = (predicted, plan.summary())
        if "all_reduce" not in kept and mode == "real":
            continue
        jobs.append(Job(task=name, mode=mode, profile=str(path), plans=kept, steps=steps, warm_up=warm_up))
    return jobs, predictions


def measure(given: argparse.Namespace, hosts: int, link: str) -> list[Row]:
    """All jobs of one cluster."""
    jobs, predictions = jobs_of(given, hosts, link)
    jobs_path = given.out / f"jobs-{hosts}x{link.replace('/', 'p')}.json"
    jobs_path.write_text(json.dumps([job.model_dump() for job in jobs]))
    rows: list[Row] = []

    def take(label: str, line: str) -> None:
        if not line.startswith(RESULT):
            print(f"[{label}] {line}", file=sys.stderr)
            return
        result = json.loads(line.removeprefix(RESULT))
        for plan, seconds in result["seconds"].items():
            predicted, what = predictions.get((result["task"], result["mode"], plan), (None, plan))
            spread = sorted(seconds)
            rows.append(
                Row(
                    task=result["task"],
                    mode=result["mode"],
                    hosts=hosts,
                    link=link,
                    plan=plan,
                    predicted=predicted,
                    measured=statistics.median(seconds),
                    p10=spread[len(spread) // 10],
                    p90=spread[(9 * len(spread)) // 10],
                    what=what,
                )
            )
            print(_line(rows[-1]), flush=True)

    spec = ClusterSpec.uniform(num_hosts=hosts, bandwidth=parse_bandwidth(link))
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(jobs_path)]
    LabEngine(spec).run(command, on_line=take, env={"OMP_NUM_THREADS": "1"})
    return rows


def _line(row: Row) -> str:
    error = "" if row.predicted is None else f"{format_seconds(row.predicted):>9}  {row.error:+7.1%}"
    cell = f"{row.mode:<8}{row.task:<14}{row.hosts} x {row.link:<10}{row.plan:<11}"
    return f"{cell}{format_seconds(row.measured):>9}  {error}"


def summarize(rows: list[Row], mode: str) -> str:
    """Errors, and how often the chosen plan was the best."""
    mine = [row for row in rows if row.mode == mode]
    errors = sorted(abs(row.error) for row in mine if row.predicted is not None)
    if not errors:
        return f"{mode}: nothing measured"
    text = f"{mode}: {len(errors)} predictions, median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}"
    cells = {(row.task, row.hosts, row.link) for row in mine}
    good = against = no_loss = 0
    for cell in cells:
        of_cell = {row.plan: row.measured for row in mine if (row.task, row.hosts, row.link) == cell}
        if "chosen" in of_cell:
            good += of_cell["chosen"] <= 1.03 * min(s for name, s in of_cell.items() if name != "ddp")
            if "ddp" in of_cell:
                against += 1
                no_loss += of_cell["chosen"] <= 1.03 * of_cell["ddp"]
    text += f"; the chosen plan was the best or within 3 % of it in {good} of {len(cells)} cells"
    if against:
        text += f", and no more than 3 % slower than DDP in {no_loss} of {against}"
    return text


def to_markdown(rows: list[Row]) -> str:
    """The tables of the documentation."""
    parts = []
    for mode in dict.fromkeys(row.mode for row in rows):
        parts += [
            f"## {'Virtual compute' if mode == 'virtual' else 'Real computing'}",
            "",
            summarize(rows, mode) + ".",
            "",
        ]
        parts += [
            "| task | hosts | link | plan | predicted | measured | p10 – p90 | error |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for row in rows:
            if row.mode == mode:
                predicted = "" if row.predicted is None else format_seconds(row.predicted)
                error = "" if row.predicted is None else f"{row.error:+.1%}"
                spread = f"{format_seconds(row.p10)} – {format_seconds(row.p90)}"
                parts.append(
                    f"| {row.task} | {row.hosts} | {row.link} | {row.plan} | {predicted} | "
                    f"{format_seconds(row.measured)} | {spread} | {error} |"
                )
        parts.append("")
    return "\n".join(parts)


MARK = "<!-- written by benchmarks/prediction.py from here on -->"


def write_docs(path: Path, rows: list[Row]) -> None:
    """Replaces the tables of a page, keeps what a person wrote above them."""
    above = path.read_text(encoding="utf-8").split(MARK)[0] if path.exists() else "# Predicted against measured\n\n"
    facts = f"{os.cpu_count()} cores for all hosts together, one thread for each rank, torch {torch.__version__}.\n"
    path.write_text(f"{above}{MARK}\n\n{facts}\n{to_markdown(rows)}", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/prediction"), help="files and results; is gone on with")
    parser.add_argument("--docs", type=Path, help="a page whose tables to write")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--modes", nargs="*", default=["virtual", "real"], choices=["virtual", "real"])
    parser.add_argument("--hosts", nargs="*", type=int, default=list(HOSTS))
    parser.add_argument("--links", nargs="*", default=list(LINKS))
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of counted steps for each plan")
    parser.add_argument("--longest", type=float, default=8.0, help="seconds of a step from which it is left out")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.worker)
        return
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "results.jsonl"
    rows = [Row.model_validate_json(line) for line in results.read_text().splitlines()] if results.exists() else []
    try:
        for hosts, link in product(given.hosts, given.links):
            parse_bandwidth(link)
            if any((row.hosts, row.link) == (hosts, link) for row in rows):
                continue
            found = measure(given, hosts, link)
            rows += found
            with results.open("a") as file:
                file.writelines(row.model_dump_json() + "\n" for row in found)
    except PoseidonError as error:
        sys.exit(f"error: {error}")
    for mode in given.modes:
        print(summarize(rows, mode))
    if given.docs:
        write_docs(given.docs, rows)


if __name__ == "__main__":
    main()
