"""Parameters that backward did not reach: they count as zero, and are named once."""

from collections.abc import Callable, Sequence

from torch import nn

from poseidon.comm.scheme import Exchange

_NAMED = 6
"""So many parameters are named in a message."""


class Unused:
    """Looks at what each exchange has learned about who made which gradient; the same on every rank.

    Args:
        model: The root module.
        say: Told in words of parameters that have not been named before, and whether no rank reached them.
    """

    def __init__(self, model: nn.Module, say: Callable[[str, bool], None]) -> None:
        self._model = model
        self._say = say
        self.reasons: dict[str, str] = {}
        """By name, when a gradient was first missing and on how many ranks it was made then."""
        self._most = (-1, 0.0)
        """An exchange, and on how many ranks gradients were made in it."""

    def look(self, exchanges: Sequence[Exchange], index: int) -> None:
        """Names what is missing, unless it has been.

        Where nothing at all was made, ranks have run out of samples; where a rank made nothing, that one has.

        Args:
            exchanges: Finished ones, of one step; those that end later may follow in another call.
            index: The step's number.
        """
        made = [exchange.made for exchange in exchanges if exchange.made]
        before = self._most[1] if self._most[0] == index else 0.0
        most = max((max(counts) for counts in made), default=before)
        self._most = (index, max(most, before))
        if all(min(counts) == self._most[1] for counts in made):
            return
        self._name([(p, n) for e in exchanges for p, n in zip(e.parameters, e.made, strict=False)], index)

    def _name(self, counts: Sequence[tuple[nn.Parameter, float]], index: int) -> None:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        most = self._most[1]
        new = {names.get(id(p), ""): int(n) for p, n in counts if n < most and p.requires_grad}
        new = {name: count for name, count in new.items() if name not in self.reasons and name}
        if never := [name for name, count in new.items() if not count]:
            self.reasons |= dict.fromkeys(never, f"no gradient on any rank in exchange {index}: counts as zero")
            self._say(
                f"{_counted(never)} got no gradient on any rank in exchange {index}: {_listed(never)}; what gets none "
                "counts as zero and stays as it is",
                True,
            )
        if some := {name: count for name, count in new.items() if count}:
            for name, count in some.items():
                self.reasons[name] = f"a gradient on {count} of {int(most)} ranks in exchange {index}: zero elsewhere"
            self._say(
                f"{_counted(some)} got a gradient on some ranks only in exchange {index}: "
                f"{_listed([f'{name} ({count} of {int(most)})' for name, count in some.items()])}; elsewhere it counts "
                "as zero",
                False,
            )


def _counted(names: Sequence[str] | dict[str, int]) -> str:
    return "1 parameter" if len(names) == 1 else f"{len(names)} parameters"


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_NAMED])
    return listed if len(names) <= _NAMED else f"{listed} and {len(names) - _NAMED} more"
