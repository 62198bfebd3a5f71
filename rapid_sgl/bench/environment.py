"""Where and on what a measurement ran: enough to repeat it, without paths of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from rapid_sgl.http_client import ServerInfo

SERVER_FIELDS = (
    "device",
    "dtype",
    "attention_backend",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "max_total_num_tokens",
    "max_running_requests",
    "chunked_prefill_size",
    "tp_size",
)


def environment(model: str) -> dict[str, Any]:
    """This machine and software, as plain JSON values.

    Args:
        model: path or hub id; of a local path only the last part is kept.
    """
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name.replace("-", "_"): metadata.version(name) for name in ("torch", "sglang", "rapid-sgl")},
        "commit": commit(),
        "model": Path(model).name if Path(model).is_dir() else model,
    }


def server_facts(info: ServerInfo) -> dict[str, Any]:
    """What decides a server's speed, as it reports itself."""
    return {name: info.raw[name] for name in SERVER_FIELDS if info.raw.get(name) is not None}


def cpu_model() -> str:
    """The processor's name; where the system does not tell, its architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Short hash of the checkout that this code runs from, with ``+`` when it has changes; None elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None  # no git on this machine, or a checkout without commits


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
