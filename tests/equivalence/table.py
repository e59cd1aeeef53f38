"""Writes the page that says what was found equal: `python -m tests.equivalence.table docs/equivalence.md`.

It runs every combination, as the tests do, and writes nothing if one of them fails.
"""

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tests.equivalence.harness import Combination
from tests.equivalence.outcomes import COLUMNS, WORLD_SIZES, Verdict, problem, verdicts
from tests.equivalence.situation import Situation
from tests.equivalence.situations import FAMILIES

MARK = "<!-- written by tests/equivalence/table.py from here on -->"
EXACT = 1e-10
"""Tolerance of situations in float64."""

Found = Mapping[Combination, Mapping[int, Verdict]]
"""By combination and number of ranks."""


def run_everything() -> Found:
    """Every combination, two families at a time."""
    wanted = [(family, world_size) for family in FAMILIES for world_size in WORLD_SIZES]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda one: verdicts(*one, every=True), wanted)
    found: dict[Combination, dict[int, Verdict]] = {}
    for (_, world_size), of_family in zip(wanted, results, strict=True):
        for combination, verdict in of_family.items():
            found.setdefault(combination, {})[world_size] = verdict
    return found


def problems(found: Found) -> list[str]:
    """What went wrong, a line for each combination and number of ranks."""
    return [
        f"{situation} under {scheme} on {world_size} ranks: {text.splitlines()[0]}"
        for (situation, scheme), by_size in found.items()
        for world_size, verdict in by_size.items()
        if (text := problem(Combination(situation, scheme), world_size, verdict))
    ]


def page(found: Found) -> str:
    """What stands below the mark."""
    num_situations, count = sum(map(len, FAMILIES.values())), sum(map(len, found.values()))
    lines = [
        f"torch {torch.__version__}; {num_situations} situations, {count} combinations of situation, scheme, ranks; "
        f"everything in float64 and within {EXACT:g} where a row says nothing else.",
    ]
    for family, situations in FAMILIES.items():
        lines += ["", f"## {family.capitalize()}", "", *_table(situations, found), *_reasons(situations)]
    return "\n".join(lines) + "\n"


def title(situation: type[Situation]) -> str:
    """The first cell of a row."""
    text = (situation.__doc__ or "").strip().splitlines()[0].removesuffix(".")
    return text if situation.tolerance <= EXACT else f"{text} (within {situation.tolerance:g})"


def rows_of_page(text: str) -> list[str]:
    """The first cells of all rows of a page."""
    rows = [
        line.split(" | ")[0].removeprefix("| ") for line in text.partition(MARK)[2].splitlines() if line[:2] == "| "
    ]
    return [row for row in rows if row not in ("situation", "---")]


def _table(situations: Mapping[str, type[Situation]], found: Found) -> list[str]:
    return [
        f"| situation | {' | '.join(COLUMNS)} |",
        "| --- " * (len(COLUMNS) + 1) + "|",
        *(
            f"| {title(situation)} | {' | '.join(_cell(situation, name, scheme, found) for scheme in COLUMNS)} |"
            for name, situation in situations.items()
        ),
    ]


def _cell(situation: type[Situation], name: str, scheme: str, found: Found) -> str:
    by_size = found.get(Combination(name, scheme))
    if by_size is None:
        return "–"
    if scheme in situation.refused:
        return f"refused: {situation.refused[scheme]}"
    worst = max(verdict.error for verdict in by_size.values())
    return f"{worst:.0e}" if worst else "0"


def _reasons(situations: Mapping[str, type[Situation]]) -> list[str]:
    """Why schemes were left out that could carry some layer."""
    lines = [
        f"- {title(situation)}, {scheme}: {reason}."
        for situation in situations.values()
        for scheme, reason in situation.left_out.items()
    ]
    return ["", "Left out:", "", *lines] if lines else []


def main(path: Path) -> None:
    """Replaces what stands below the mark of a page.

    Raises:
        SystemExit: Something is not equal.
    """
    found = run_everything()
    if wrong := problems(found):
        raise SystemExit("\n".join(wrong))
    head = path.read_text(encoding="utf-8").partition(MARK)[0]
    path.write_text(f"{head}{MARK}\n\n{page(found)}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
