"""Record the kernels that one forward pass launches, and run them again without the Python that launched them.

For a few tokens, Python (a module call and a few small torch operations per layer and operation) takes as long as the kernels.
What it decides is the same for every pass of the same number of tokens: which kernels run, over which weights, and where
their outputs lie. A ``Tape`` keeps that, as a CUDA graph does on a GPU.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rapid_sgl.platform import kernels_tape
from rapid_sgl.platform.kernels_launch import Kernel, compiled, parallel_address, parallel_launcher

# Activations of one pass: those of 128 tokens of an 8B model take some ten megabytes. Untouched pages cost nothing.
ARENA_BYTES = 64 << 20
_LINE = 16  # float32 values of a cache line

Block = np.ndarray | ctypes.Array
# Shape of an attention: KV heads, query heads per KV head, window, dimension of keys and of values.
Tag = tuple[int, int, int, int, int]


class TapeError(RuntimeError):
    """This pass cannot be recorded; the message says why."""


class Arena:
    """Memory for the activations of recorded passes. Only one pass runs at a time, so all tapes of a model share it."""

    def __init__(self, nbytes: int = ARENA_BYTES) -> None:
        self._memory = np.empty(nbytes // 4, np.float32)
        self._start = -(self._memory.ctypes.data // 4) % _LINE
        self.reset()

    def reset(self) -> None:
        """Forget who uses what: the next recording starts at the beginning."""
        self._next = self._start
        # A new dictionary, so that tensors of the last recording that die later return nothing to this one.
        self._free: dict[int, list[int]] = defaultdict(list)

    def empty(self, *shape: int) -> torch.Tensor:
        """A float32 tensor; its memory is used again once no tensor refers to it.

        Raises TapeError where the arena is full.
        """
        size = -(-math.prod(shape) // _LINE) * _LINE
        free = self._free[size]
        start = free.pop() if free else self._next
        if start == self._next:
            self._next += size
            if self._next > self._memory.size:
                raise TapeError(f"its activations exceed {self._memory.nbytes >> 20} MiB")
        # torch keeps the array alive for as long as any view of the tensor lives
        array = self._memory[start : start + math.prod(shape)]
        weakref.finalize(array, free.append, start).atexit = False
        return torch.from_numpy(array).view(shape)


class Tape:
    """The launches of one forward pass.

    ``tags`` names launches whose arguments change from pass to pass: tag to the rows, int64 [n], of their ``blocks``,
    int64 [launches, fields], and ``threads``, int64 [launches].
    """

    blocks: np.ndarray
    threads: np.ndarray
    tags: dict[Tag, np.ndarray]

    def __init__(self, arena: Arena) -> None:
        arena.reset()
        self.arena = arena
        self.positions_below = np.iinfo(np.int64).max
        self._kernels: list[Kernel] = []
        self._blocks: list[np.ndarray] = []
        self._threads: list[int] = []
        self._tags: dict[Tag, list[int]] = defaultdict(list)

    def add(self, kernel: Kernel, block: Block, threads: int, tag: Tag | None = None) -> None:
        """Note a launch before it happens."""
        if tag is not None:
            self._tags[tag].append(len(self._kernels))
        self._kernels.append(kernel)
        self._blocks.append(np.array(block, np.int64))
        self._threads.append(threads)

    def finish(self) -> None:
        """Lay the launches out for ``run``. Raises TapeError where there are none."""
        if not self._kernels:
            raise TapeError("it launched no kernel of ours")
        width = max(len(block) for block in self._blocks)
        self._first = np.zeros((len(self._blocks), width), np.int64)
        for row, block in zip(self._first, self._blocks, strict=True):
            row[: len(block)] = block
        self.blocks = self._first.copy()
        self._program = np.zeros(3 + len(self._kernels) * kernels_tape.TAPE_FIELDS, np.int64)
        self._program[:2] = len(self._kernels), parallel_address()
        launches = self._program[3:].reshape(-1, kernels_tape.TAPE_FIELDS)
        launches[:, kernels_tape.T_KERNEL] = [kernel.address for kernel in self._kernels]
        launches[:, kernels_tape.T_BLOCK] = self.blocks.ctypes.data + 8 * width * np.arange(len(self._blocks))
        launches[:, kernels_tape.T_THREADS] = self._threads
        self.threads = launches[:, kernels_tape.T_THREADS]
        self.tags = {tag: np.array(rows) for tag, rows in self._tags.items()}

    def rewind(self) -> None:
        """Blocks as they were recorded: kernels count in them."""
        self.blocks[:] = self._first

    def run(self) -> None:
        """Launch everything, with ``blocks`` and ``threads`` as they are."""
        compiled(kernels_tape.build_tape)(self._program.ctypes.data)


_recording: Tape | None = None


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Launches and allocations inside go to ``tape``."""
    global _recording
    _recording = tape
    try:
        yield
    finally:
        _recording = None


def current() -> Tape | None:
    """The tape that records now."""
    return _recording


def launch(kernel: Kernel, block: Block, threads: int, tag: Tag | None = None) -> None:
    """Run a kernel over an int64 argument block on some threads, on tape if one records.

    No threads: not in this pass, though it may run in another one of the same tape.
    """
    if _recording is not None:
        _recording.add(kernel, block, threads, tag)
    if threads:
        address = block.ctypes.data if isinstance(block, np.ndarray) else ctypes.addressof(block)
        parallel_launcher()(kernel, address, threads)


def empty(*shape: int) -> torch.Tensor:
    """An uninitialised float32 tensor on the CPU, where a tape that records finds it again."""
    if _recording is not None:
        return _recording.arena.empty(*shape)
    return torch.empty(shape, dtype=torch.float32)


def can_run() -> bool:
    """Whether tapes run here: they need torch's GNU OpenMP."""
    return parallel_address() != 0


# torch operations that move no data
_VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unsqueeze",
        "squeeze",
        "alias",
        "detach",
        "transpose",
        "t",
        "permute",
        "expand",
        "as_strided",
        "unbind",
        "lift_fresh",
    ]
)


def views_only(name: Any) -> bool:
    """Whether a torch operation, by its overload packet's name, moves no data, so that a tape may leave it out."""
    return str(name).removeprefix("aten.") in _VIEWS
