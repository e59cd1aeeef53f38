"""Whether a loop still does what its plan was made for: backward passes to an exchange, and rows of its layers.

What travels as factors or touched rows grows with every pass and every sample; what travels dense does not. So a plan
that was right for one pass may be wrong for eight.
"""

from collections.abc import Mapping

from poseidon.plan import Plan

GROWN = 2.0
"""So many times as many rows, or as many or as few passes, are another loop."""
LASTING = 3
"""For so many exchanges in a row; a batch that is larger now and then is none."""


class GrowthWatch:
    """Knows what a plan was made for, and tells once when a run has left it."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._num_passes = 0
        self._rows: dict[str, int] = {}
        self._lasting = 0

    def restart(self, plan: Plan) -> None:
        """The run goes on under this plan; nothing is expected of one that was made without a profile."""
        self._lasting = 0
        if plan is self._plan:
            return
        self._plan = plan
        known = plan.profile.batch_size > 0
        self._num_passes = plan.profile.accumulate if known else 0
        most = max(plan.loads)  # the rank with most samples has most rows
        self._rows = {name: round(most * layer.rows) for name, layer in plan.layers.items() if known and layer.rows}

    def note(self, num_passes: int, rows: Mapping[str, int]) -> str:
        """Takes one exchange, seen alike by all ranks.

        Args:
            num_passes: Backward passes of the rank that made most.
            rows: By layer that travels as rows, those of the rank that had most.

        Returns:
            What has grown, in words; nothing as long as that has not lasted.
        """
        text = self._passes_in_words(num_passes) or self._rows_in_words(rows)
        self._lasting = self._lasting + 1 if text else 0
        if self._lasting < LASTING:
            return ""
        self._lasting = 0
        self._num_passes = num_passes
        self._rows.update(rows)
        return text

    def _passes_in_words(self, now: int) -> str:
        before = self._num_passes
        if not (now and before) or max(now, before) < GROWN * min(now, before):
            return ""
        passes = "1 backward pass" if now == 1 else f"{now} backward passes"
        return f"{passes} to an exchange, where the plan was made for {before}"

    def _rows_in_words(self, rows: Mapping[str, int]) -> str:
        grown = [name for name, count in rows.items() if count >= GROWN * self._rows.get(name, count)]
        if not grown:
            return ""
        first = grown[0]
        others = f", and so {len(grown) - 1} more" if len(grown) > 1 else ""
        return (
            f"{first} has {rows[first]:,} rows to an exchange, and the plan is for {self._rows[first]:,}{others}: "
            "what travels as rows grows with them"
        )
