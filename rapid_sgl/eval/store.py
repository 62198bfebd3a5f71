"""A run's folder: its settings, and one JSON line per sample and method, so that it can be taken up again."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rapid_sgl.eval import EvalError

SETTINGS, PREDICTIONS, REPORT = "settings.json", "predictions.jsonl", "report.json"
FIELDS = ("sample", "method", "score", "prediction", "prompt_digest")
Key = tuple[str, str]  # sample id, method name


class RunFolder:
    """Predictions made so far. ``add`` may be called from many threads. Use as a context manager.

    Args:
        path: made if missing.
        settings: what every prediction of the folder has in common.

    Raises:
        EvalError: the folder has other settings, another run is writing to it, or a line is not a prediction.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.predictions: dict[Key, dict[str, Any]] = {}
        self._lock = threading.Lock()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EvalError(f"cannot make the folder {path}: {error}") from error
        self._file: IO[str] = (path / PREDICTIONS).open("a", encoding="utf-8")
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise EvalError(
                    f"another run is writing to {path}; wait for it or use another --output"
                ) from None
            self._check_settings(dict(settings))
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def add(self, record: dict[str, Any]) -> None:
        """Write one prediction; it is on disk, apart from the system's own buffers, when this returns."""
        line = json.dumps(record, ensure_ascii=False)
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()
            self.predictions[record["sample"], record["method"]] = record

    def write_report(self, report: Mapping[str, Any]) -> None:
        _write(self.path / REPORT, report)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self.path / SETTINGS
        if not path.exists():
            if (self.path / PREDICTIONS).stat().st_size:
                raise EvalError(f"{self.path} holds predictions without settings; use another --output")
            _write(path, settings)
            return
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise EvalError(f"{path} is not JSON ({error}); use another --output") from error
        settings = json.loads(json.dumps(settings))  # tuples become lists, as they did in the file
        differing = [
            f"{name}: {there.get(name)!r} there, {settings.get(name)!r} now"
            for name in sorted({*there, *settings})
            if there.get(name) != settings.get(name)
        ]
        if differing:
            raise EvalError(
                f"{self.path} holds a run with other settings ({'; '.join(differing)}); use another --output, or "
                "delete it"
            )

    def _read(self) -> None:
        """Read all lines; a last one that was not written to its end is cut off."""
        path = self.path / PREDICTIONS
        data = path.read_bytes()
        complete = data.rfind(b"\n") + 1
        if complete < len(data):
            os.truncate(path, complete)
        for number, line in enumerate(data[:complete].split(b"\n")[:-1], 1):
            try:
                record = json.loads(line)
                missing = [name for name in FIELDS if name not in record]
            except (ValueError, TypeError) as error:
                raise EvalError(
                    f"{path}, line {number}: not a prediction ({error}); delete the line"
                ) from error
            if missing:
                raise EvalError(f"{path}, line {number}: no field {missing[0]!r}; delete the line")
            self.predictions[record["sample"], record["method"]] = record


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """At once: a killed run leaves the old file or the new one."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
