"""The command `poseidon`: its verbs, and what every verb has in common.

A verb is a file in this folder, a function in it of the same name, and one line in `VERBS`. Its module is imported when
the verb is used, so that `poseidon --help` does not wait for torch. Errors that Poseidon raises on purpose become one
line here, and logging is set up here and nowhere else.
"""

import logging
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from poseidon import __version__
from poseidon.errors import PoseidonError
from poseidon.reading import printable


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One verb of the command line."""

    module: str
    """Where the function of the verb's name is."""
    help: str
    """One line for `poseidon --help`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How its arguments are read, as click's context settings."""


VERBS = {
    "profile": Verb(module="poseidon.cli.profile", help="Measure what each layer of a model costs in a step."),
    "plan": Verb(module="poseidon.cli.plan", help="Say before a run what N hosts will give, with which plan, and why."),
    "simulate": Verb(module="poseidon.cli.simulate", help="Predict the steps of a plan on a cluster."),
    "train": Verb(module="poseidon.cli.train", help="Train a task, on one process or over several hosts."),
    "report": Verb(module="poseidon.cli.report", help="Say what a run achieved, what limited it, and was predicted."),
    "bench": Verb(module="poseidon.cli.bench", help="Race Poseidon against DDP or one scheme, step by step in turns."),
    "checkpoint": Verb(module="poseidon.cli.checkpoint", help="List and verify checkpoints; export or import weights."),
    "probe": Verb(module="poseidon.cli.probe", help="Measure hosts and links, and write them to a cluster's file."),
    "doctor": Verb(module="poseidon.cli.doctor", help="Check hosts and every pair of them, and say what to do."),
    "drain": Verb(module="poseidon.cli.drain", help="Ask a rank of a running job to leave with nothing lost."),
    "lab": Verb(
        module="poseidon.cli.lab",
        help="Run a command on emulated hosts with links of a chosen rate.",
        settings={"allow_interspersed_args": False},  # what follows the command's name is the command's
    ),
}


class Verbs(TyperGroup):
    """The verbs of `VERBS`, each loaded when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all verbs."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that knows the verb's name and help only, for the list of verbs."""
        verb = VERBS.get(cmd_name)
        return verb and TyperCommand(cmd_name, help=verb.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb itself, for use."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and _load(name), rest

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb; Poseidon's errors become one line and exit code 1."""
        try:
            return super().invoke(ctx)
        except PoseidonError as error:
            if logging.getLogger("poseidon").isEnabledFor(logging.DEBUG):
                raise
            print(f"poseidon: error: {printable(str(error))}", file=sys.stderr)
            raise SystemExit(1) from error
        except KeyboardInterrupt as error:
            raise SystemExit(130) from error


app = typer.Typer(
    name="poseidon",
    cls=Verbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        print(f"poseidon {__version__}")
        raise typer.Exit


def _debug(value: bool) -> None:
    if value:
        logging.getLogger("poseidon").setLevel(logging.DEBUG)


@app.callback()
def poseidon(
    debug: bool = typer.Option(
        False, "--debug", callback=_debug, help="Say more, and show where an error was raised. Goes after a verb too."
    ),
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Say which version this is."
    ),
) -> None:
    """Train PyTorch models over the hosts and the network that you have."""


class _Lines(logging.Formatter):
    """Log records as a person reads them: what Poseidon says plainly, warnings as such, the rest with its origin."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        text = printable(super().format(record))
        if record.levelno == logging.INFO:
            return f"poseidon: {text}"
        origin = f"{record.name}: " if record.levelno < logging.INFO else ""
        return f"poseidon: {record.levelname.lower()}: {origin}{text}"


def main() -> None:
    """Entry point of the command `poseidon`."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("poseidon").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _exit_in_good_order)
    app(prog_name="poseidon")


def _load(name: str) -> Any:
    """The command of a verb, with `--debug` added."""
    verb = VERBS[name]
    single = typer.Typer(add_completion=False)
    single.command(name, context_settings=dict(verb.settings))(getattr(import_module(verb.module), name))
    command = typer.main.get_command(single)
    for option in typer.main.get_command(app).params:
        if option.name == "debug":
            option.expose_value = False
            command.params.append(option)
    return command


def _exit_in_good_order(number: int, frame: FrameType | None) -> NoReturn:
    """Unwinds through every `with` and `finally`, as Ctrl-C does."""
    raise SystemExit(128 + number)
