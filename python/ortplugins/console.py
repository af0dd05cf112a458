"""Tables, progress and messages of the command line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_PIPE_WIDTH = 120

out = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
"""Results go here."""

err = Console(stderr=True)
"""Progress and messages go here, so that results can be piped."""

VERDICT_STYLE = {"faster": "green", "same": "default", "slower": "red"}


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar for work told as (what, fraction); nothing is drawn where stderr is no terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, fraction: bar.update(task, description=what, completed=fraction)


def table(title: str, columns: Iterable[str], numbers: Iterable[str] = ()) -> Table:
    """An empty table; the columns in ``numbers`` are aligned to the right."""
    result = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    numbers = set(numbers)
    for column in columns:
        result.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return result


def passed(ok: bool) -> str:
    """The word for a verdict, coloured."""
    return "[green]ok[/green]" if ok else "[bold red]FAILED[/bold red]"


def shape(dims: Iterable[int]) -> str:
    """``2x128``, or ``scalar``."""
    return "x".join(map(str, dims)) or "scalar"


def shapes(inputs: Mapping[str, Iterable[int]]) -> str:
    """``input_ids 2x128, attention_mask 2x128``."""
    return ", ".join(f"{name} {shape(dims)}" for name, dims in inputs.items())


def problem(sizes: Mapping[str, object]) -> str:
    """The shape of a benchmark record without what is absent: ``rows 4096 cols 128``."""
    return " ".join(f"{name} {value}" for name, value in sizes.items() if value not in (False, "none"))


def error(value: float | None) -> str:
    """An error with two digits, or a dash."""
    return "-" if value is None else f"{value:.1e}"


def _unit(value_us: float) -> tuple[float, str]:
    return (1.0, "us") if value_us < 1e3 else (1e-3, "ms") if value_us < 1e6 else (1e-6, "s")


def microseconds(value: float) -> str:
    """A time with three digits, in the unit that suits it."""
    factor, unit = _unit(value)
    return f"{value * factor:.3g} {unit}"


def quantity(value: float) -> str:
    """A count with three digits and a decimal prefix: ``1.2 G``."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g}"


def timing(value: Any) -> str:
    """A median with its spread in the same unit: ``1.23 ms (1.20 .. 1.31)``."""
    factor, unit = _unit(value.median_us)
    low, median, high = (f"{v * factor:.3g}" for v in (value.spread_us[0], value.median_us, value.spread_us[1]))
    return f"{median} {unit} [dim]({low} .. {high})[/dim]"


def ratio(value: float, verdict: str) -> str:
    """How many times as fast, coloured by the verdict."""
    return f"[{VERDICT_STYLE[verdict]}]{value:.2f}x[/] {'' if verdict == 'same' else verdict}".rstrip()
