"""Progress on stderr, so that stdout holds nothing but a command's result."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Status:
    """A spinner with a text and the elapsed time; a context manager.

    Without a terminal each new text is printed as one line instead.
    """

    def __init__(self, text: str) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )
        self._task = self._progress.add_task(text, total=None)
        self._text = ""
        self.update(text)

    def __enter__(self) -> Status:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def update(self, text: str) -> None:
        """Show another text; the same one again is not repeated."""
        if text == self._text:
            return
        self._text = text
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(f"{text} ...", markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the spinner away; safe to call twice."""
        self._progress.stop()
