"""The rows: every situation by name, in families that share their processes."""

from collections.abc import Mapping
from types import ModuleType

from tests.equivalence import broken
from tests.equivalence.situation import Situation
from tests.equivalence.situations import (
    accumulation,
    batches,
    compiled,
    hooks,
    loop,
    passes,
    precision,
    rows,
    structure,
)

_FAMILIES: tuple[ModuleType, ...] = (structure, passes, rows, accumulation, batches, loop, hooks, precision, compiled)


def _situations(module: ModuleType) -> dict[str, type[Situation]]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Situation) and value.__module__ == module.__name__
    }


FAMILIES: Mapping[str, Mapping[str, type[Situation]]] = {
    module.__name__.rpartition(".")[2]: _situations(module) for module in _FAMILIES
}
SITUATIONS: Mapping[str, type[Situation]] = {
    name: situation for family in (*FAMILIES.values(), _situations(broken)) for name, situation in family.items()
}
