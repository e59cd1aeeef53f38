"""`poseidon train`: a task on one process, on the ranks that torchrun started, or on emulated hosts."""

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from poseidon import __version__
from poseidon.auto import distribute
from poseidon.cli.hosts import (
    AtOption,
    ClusterOption,
    CpuOption,
    HostsOption,
    LinkOption,
    MinHostsOption,
    ProcsPerHostOption,
    RestartsOption,
    describe_links,
    is_worker,
    joined,
    launch,
    prepare,
    read_hosts,
)
from poseidon.cli.progress import Progress, StepsFile, Tensorboard, Watchers
from poseidon.cli.terminal import make_console
from poseidon.cli.train_options import TrainOptions
from poseidon.cli.virtual import VirtualOption, as_virtual
from poseidon.cluster.spec import LinkChange
from poseidon.comm.group import Group
from poseidon.planner.space import check_allowed
from poseidon.report.record import predict
from poseidon.report.summary import Summary, draw, summarize
from poseidon.runtime.attach import Run
from poseidon.runtime.baseline import Baseline, measure_baseline
from poseidon.runtime.clocks import Clocks, measure_offsets
from poseidon.runtime.keeping import Keeping
from poseidon.runtime.ledger import Watcher
from poseidon.runtime.memory import agree_on_attempt
from poseidon.runtime.options import Shares
from poseidon.runtime.run_folder import RunFolder, check_unused
from poseidon.runtime.seeding import seed as seed_rank
from poseidon.runtime.surroundings import Surroundings, counted, device_of_rank, survey
from poseidon.runtime.trainer import Outcome, Schedule
from poseidon.runtime.trainer import train as train_task
from poseidon.runtime.weights import apply_weights, load_weights
from poseidon.tasks import Task, load_task
from poseidon.timeline import Step, Timeline, to_line

SUMMARIZED_STEPS = 200
"""The last steps of every rank, from which the closing summary is made."""


def train(
    task: Annotated[
        str | None,
        typer.Argument(
            help="A built-in task's name, or path/to/file.py:function. Not needed with --resume.", metavar="TASK"
        ),
    ] = None,
    hosts: HostsOption = None,
    procs_per_host: ProcsPerHostOption = 1,
    link: LinkOption = None,
    cpu: CpuOption = None,
    cluster: ClusterOption = None,
    at: AtOption = None,
    plan: Annotated[str, typer.Option(help="auto, all_reduce, or a plan's file.")] = "auto",
    allow: Annotated[
        str, typer.Option(help="How far auto may bend the mathematics: exact, rounded, compressed or relaxed.")
    ] = "exact",
    shares: Annotated[
        Shares, typer.Option(help="speed gives ranks that compute faster more samples, and adapts that on the way.")
    ] = "equal",
    batch: Annotated[
        int | None, typer.Option(help="Samples per rank and backward pass; the task's own if not given.", min=1)
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Backward passes to one exchange and update.", min=1)] = 1,
    epochs: Annotated[int | None, typer.Option(help="The task's own if not given.", min=1)] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many steps.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the samples.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="A new folder for model, plan, steps and timeline.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, by its own options.", metavar="RUN")
    ] = None,
    init: Annotated[
        Path | None, typer.Option(help="Begin with these weights: .safetensors, .pt, a checkpoint or a run's folder.")
    ] = None,
    save_every: Annotated[
        str, typer.Option(help="With --out, a checkpoint so often and after each epoch: 500steps or 10min.")
    ] = "10min",
    keep_last: Annotated[int, typer.Option(help="So many of the newest checkpoints stay.", min=1)] = 3,
    keep_best: Annotated[int, typer.Option(help="And so many of the best, by the task's score.", min=0)] = 0,
    commit_every: Annotated[
        str | None,
        typer.Option(
            help="Keep steps in memory so often, for a restart; 1% of the time if not given.", metavar="EVERY"
        ),
    ] = None,
    restarts: RestartsOption = 0,
    min_hosts: MinHostsOption = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events for TensorBoard too.")] = False,
    virtual: VirtualOption = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline/--no-baseline",
            help="With --out, first measure for some seconds what rank 0 trains alone, as the measure of efficiency.",
        ),
    ] = True,
    check_replicas: Annotated[
        bool, typer.Option("--check-replicas", help="Prove after each epoch that all ranks hold the same parameters.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say at the end for each parameter how it travels and why not otherwise.")
    ] = False,
    context: typer.Context = None,  # type: ignore[assignment] # none as a function
) -> None:
    """Train a task, over several hosts if there are any.

    poseidon train fashion-mnist --hosts 4 --link 1Gbit/s --epochs 3 --out runs/first

    torchrun --nnodes 2 … -m poseidon train fashion-mnist
    """
    command = TrainOptions.of_call(locals(), context).merged()
    check_allowed(command.allow)
    changes = [LinkChange.parse(text) for text in command.at or []]
    spec = read_hosts(command.hosts, command.procs_per_host, command.link, command.cluster, command.cpu)
    if changes and spec is None:
        raise typer.BadParameter("links that change need emulated hosts: add --hosts", param_hint="--at")
    if command.restarts and spec is None:
        raise typer.BadParameter("whoever starts the ranks starts them again: add --hosts", param_hint="--restarts")
    if command.tensorboard and command.out is None:
        raise typer.BadParameter("events need a folder: add --out", param_hint="--tensorboard")
    if command.task is None:
        raise typer.BadParameter("say what to train, or --resume a run", param_hint="TASK")
    command.keeping()  # refuses an interval that cannot be read, before anything is started
    launcher = spec is not None and not is_worker()
    if launcher:
        prepare()
    chosen = load_task(command.task)
    if command.tensorboard:
        Tensorboard.check()
    if launcher:
        assert spec is not None
        if command.out is not None and command.resume is None:
            check_unused(command.out)
        launch(spec, changes, restarts=command.restarts, min_hosts=command.min_hosts)
        return
    schedule = command.schedule(chosen)
    chosen = as_virtual(chosen, command.virtual, schedule.batch_size // schedule.accumulate)
    options = {
        **{name: getattr(command, name) for name in ("task", "plan", "allow", "shares", "virtual", "at")},
        **schedule.model_dump(),
        "link": describe_links(spec),
        "link_bytes_per_s": None if spec is None else min(host.link.up for host in spec.hosts),
        "command": command.to_facts(),
    }
    with joined() as group:
        agree_on_attempt(group)
        work(chosen, schedule, options, group, command, command.keeping())


def work(
    task: Task, schedule: Schedule, options: dict[str, Any], group: Group, command: TrainOptions, keeping: Keeping
) -> None:
    """What every rank does.

    Args:
        task: What is trained.
        schedule: How long.
        options: What is written down of them.
        group: All ranks.
        command: What was asked for.
        keeping: What is kept on the way.
    """
    console = make_console()
    device = device_of_rank()
    surroundings = survey(group, device, options["link"])
    with ExitStack() as stack:
        facts: dict[str, Any] = {
            "poseidon": __version__,
            "task": task.name,
            "note": task.note,
            "options": options,
            "surroundings": surroundings.model_dump(),
            "baseline": None,
        }
        folder = None
        if command.out is not None:
            folder = stack.enter_context(RunFolder(command.out, group, check=command.check_folder(group.rank)))
            facts["baseline"] = folder.begin(facts).get("baseline")
        if group.rank == 0:
            console.print(f"{task.name}: {task.note}\n{surroundings.sentence()}", soft_wrap=True)
        if command.baseline and folder is not None and group.world_size > 1 and not command.goes_on:
            facts["baseline"] = _measure_alone(task, schedule, device, group, surroundings, console).model_dump()
        torch.manual_seed(schedule.seed)
        model = task.make_model().to(device)
        if command.init is not None and group.rank == 0:  # the others get them from here
            apply_weights(model, load_weights(command.init))
        optimizer = task.make_optimizer(model.parameters())
        wanted = {name: options[name] for name in ("plan", "allow", "shares")}
        run = distribute(model, optimizer, group=group, **wanted)
        seed_rank(schedule.seed, group=group)  # dropout draws other masks on each rank
        if folder is not None:
            run.recorder.on_step.append(folder.note_step)
        watchers: list[Watcher] = [] if folder is None else [StepsFile(folder, facts)]
        if group.rank == 0:
            watchers += _onlookers(task, console, folder, stack, tensorboard=command.tensorboard)
        clocks_at_start = measure_offsets(group)
        outcome = train_task(task, run, schedule, Watchers(watchers), keeping)
        clocks = Clocks(start=clocks_at_start, end=measure_offsets(group))
        summary = summarize(clocks.align_all(gather_timelines(run)))
        exchanges, explanation = run.layers_by_exchange, run.explain() if command.explain else ""
        run.detach()
        if folder is not None:
            _finish(folder, run, {**facts, "exchanges": exchanges}, clocks, outcome, summary)
        if group.rank == 0:
            _report(console, task, run, outcome, summary, surroundings, folder)
            if command.explain:
                console.print(f"\n{explanation}", soft_wrap=True)
        group.barrier()


def _measure_alone(
    task: Task, schedule: Schedule, device: torch.device, group: Group, surroundings: Surroundings, console: Console
) -> Baseline:
    note = f"rank 0 alone on {surroundings.device} with {counted(surroundings.threads, 'thread')}"
    alone = measure_baseline(task, schedule, device, group, note=note)
    if group.rank == 0:
        steps = counted(alone.num_steps, "step")
        console.print(f"one rank alone: {alone.samples_per_s:,.0f} samples/s over {steps}", soft_wrap=True)
    return alone


def _onlookers(
    task: Task, console: Console, folder: RunFolder | None, stack: ExitStack, *, tensorboard: bool
) -> list[Watcher]:
    """What shows on rank 0 how it goes."""
    onlookers: list[Watcher] = [stack.enter_context(Progress(task.metric, console))]
    if folder is not None and tensorboard:
        onlookers.append(stack.enter_context(Tensorboard(folder.path / "tensorboard")))
    return onlookers


def gather_timelines(run: Run) -> list[Timeline]:
    """The last steps of every rank, by rank; without those in which plans were tried out, if there are others."""
    kept = run.timeline.steps
    settled = [step for step in kept if step.scheme == "plan"] or kept
    mine = "".join(to_line(step) for step in settled[-SUMMARIZED_STEPS:])
    texts = run.group.all_gather_text(mine, "gathering timelines")
    return [Timeline(steps=tuple(map(Step.model_validate_json, text.splitlines()))) for text in texts]


def _finish(
    folder: RunFolder, run: Run, facts: dict[str, Any], clocks: Clocks, outcome: Outcome, summary: Summary
) -> None:
    elsewhere = folder.merge_timelines(clocks)
    if run.group.rank != 0:
        return
    if elsewhere:
        ranks = ", ".join(map(str, elsewhere))
        logging.getLogger(__name__).warning("the timelines of ranks %s are in %s on their hosts", ranks, folder.path)
    folder.write_model(run.model, run.plan)
    folder.write_predicted(predict(run.plan, run.rates))
    result = {**outcome.model_dump(), "samples_per_s": outcome.samples_per_s, "summary": summary.model_dump()}
    found = {
        "clocks": clocks.model_dump(),
        "rates": run.rates and run.rates.model_dump(mode="json"),
        "events": run.events,
        "plan": run.plan.summary(),
        "result": result,
    }
    folder.write_facts({**facts, **found})


def _report(
    console: Console,
    task: Task,
    run: Run,
    outcome: Outcome,
    summary: Summary,
    surroundings: Surroundings,
    folder: RunFolder | None,
) -> None:
    scores = ", ".join(f"{name} {value:.4f}" for name, value in outcome.scores.items())
    console.print()
    console.print(
        f"{scores}; {outcome.samples_per_s:,.0f} samples/s over {counted(run.group.world_size, 'rank')}", soft_wrap=True
    )
    console.print(draw(summary, num_hosts=surroundings.hosts))
    console.print(f"plan: {run.plan.summary()}", soft_wrap=True)
    for line in outcome.kept.sentences():
        console.print(line, soft_wrap=True)
    if folder is not None:
        console.print(f"written to {folder.path}", soft_wrap=True)
