"""What is shown on the terminal: names that others gave are text there, neither markup nor commands to the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from poseidon.reading import printable


def make_console(**settings: Any) -> Console:
    """A console that shows texts as they are: `[red]` stays `[red]`, and a control character becomes visible.

    Args:
        settings: As of rich's `Console`.
    """
    return _PlainConsole(highlight=False, markup=False, emoji=False, **settings)


class _PlainConsole(Console):
    """Makes control characters visible in everything that is printed, whatever it is made of."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The pieces of what is printed; those that move the cursor are no texts and stay as they are."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)
