"""`poseidon drain`: asks a rank of a running job to leave with nothing lost."""

import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from poseidon.errors import LaunchError
from poseidon.launch.job import running_jobs


def drain(
    rank: Annotated[int, typer.Option(help="The rank whose host is to leave.", min=0)],
    job: Annotated[
        str | None, typer.Argument(help="The job's id, where several run on this machine.", show_default=False)
    ] = None,
) -> None:
    """Ask a rank to leave with nothing lost: all ranks keep their state after a step, and go on without its host.

    For jobs that `poseidon lab` or `poseidon train` has started on this machine. Elsewhere, send SIGUSR1 to the rank.
    """
    found = _choose(job)
    asked = next((one for one in found["ranks"] if one["rank"] == rank), None)
    if asked is None:
        raise LaunchError(f"no rank {rank} in job {found['job']}: it has {len(found['ranks'])} ranks, counted from 0")
    label, pid = asked["label"], asked["pid"]
    if not _listens(pid, found["job"]):
        raise LaunchError(
            f"cannot ask rank {rank} of job {found['job']} to leave: its process {pid} does not listen, as it does "
            "from poseidon.distribute() on until it ends"
        )
    os.kill(pid, signal.SIGUSR1)
    print(f"rank {rank} ({label}, process {pid}) of job {found['job']} was asked to leave")


def _choose(job: str | None) -> dict[str, Any]:
    jobs = [found for found in running_jobs() if job is None or found["job"] == job]
    if len(jobs) == 1:
        return jobs[0]
    if jobs:
        listed = ", ".join(f"{found['job']} ({len(found['ranks'])} ranks)" for found in jobs)
        raise LaunchError(f"several jobs run here: say which of {listed}")
    raise LaunchError(f"no job {f'{job} ' if job else ''}of this user runs on this machine")


def _listens(pid: int, job: str) -> bool:
    """Whether a process is of the job and takes SIGUSR1, which would end it otherwise."""
    try:
        of_job = f"POSEIDON_JOB={job}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)
    return of_job and bool(caught >> (signal.SIGUSR1 - 1) & 1)
