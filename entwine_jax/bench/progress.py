"""Shows on stderr how far a benchmark is: a bar where rich is installed, else a line a shape."""

import contextlib
import sys
from collections.abc import Callable, Iterator

# Starts a shape: takes its name, returns what to call after each of its dispatches.
StartShape = Callable[[str], Callable[[], None]]


@contextlib.contextmanager
def progress(total_dispatches: int) -> Iterator[StartShape]:
    """Shows progress over the dispatches of all shapes while the context is open."""
    try:
        import rich.console
        import rich.progress
    except ImportError:
        yield _start_line
        return
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=total_dispatches)

        def start_bar(name: str) -> Callable[[], None]:
            bar.update(task, description=name)
            return lambda: bar.advance(task)

        yield start_bar


def _start_line(name: str) -> Callable[[], None]:
    print(name, file=sys.stderr, flush=True)
    return lambda: None
