"""Forward passes of few tokens replayed from tape: what decoding, verification and drafting are made of.

SGLang has the same idea for other devices (``DecodeCudaGraphRunner``; ``CPUGraphRunner`` compiles with torch and
refuses speculative decoding). A tape is taken where all work of the decoder layers is done by kernels of this platform;
every other model runs as before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rapid_sgl.platform import tape as tapes
from rapid_sgl.platform.attention import PortableCpuAttnBackend
from rapid_sgl.platform.ops import LINEAR_ROWS
from rapid_sgl.platform.tape import Arena, Tape, TapeError

logger = logging.getLogger(__name__)


class _NoHiddenWork(TorchDispatchMode):
    """Raises TapeError at any torch operation that a tape would miss."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not tapes.views_only(func.overloadpacket):
            raise TapeError(f"{func} is not a kernel of this platform")
        return func(*args, **(kwargs or {}))


class _Recorded:
    """A tape with the tensors that carry one pass's inputs and output."""

    def __init__(self, arena: Arena, hidden: torch.Tensor, forward_batch: Any) -> None:
        self.tape = Tape(arena)
        self.hidden = arena.empty(*hidden.shape)
        self.positions = torch.empty_like(forward_batch.positions)
        self.slots = torch.empty_like(forward_batch.out_cache_loc)
        self.output = self.hidden

    def fill(self, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self.hidden.copy_(hidden)
        self.positions.copy_(positions)
        self.slots.copy_(slots)


class ReplayedForward:
    """Takes the place of ``forward`` of a decoder (``LlamaModel`` and its like) that lies at ``model.model``.

    Args:
        decoder: the module; its own ``forward`` records.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder
        self.eager = type(decoder).forward.__get__(decoder)
        self.parameters = list(decoder.parameters())
        self._arena: Arena | None = None
        self._recorded: dict[tuple[Any, ...], _Recorded] = {}
        self._weights: list[int] = []
        self._refused = False

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Hidden states float32 [tokens, hidden] after the last norm, as the decoder's own ``forward``."""
        from sglang.srt.model_executor.forward_context import get_attn_backend

        backend = get_attn_backend()
        others = {name: value for name, value in others.items() if value is not None}
        if (
            others
            or input_embeds is not None
            or not self._suits(input_ids, positions, forward_batch, backend)
        ):
            return self.eager(input_ids, positions, forward_batch, input_embeds, **others)
        weights = [parameter.data_ptr() for parameter in self.parameters]
        if weights != self._weights:
            self._weights = weights
            self._recorded.clear()
        hidden = self.decoder.embed_tokens(input_ids)
        key = (backend, forward_batch.forward_mode, len(input_ids))
        known = self._recorded.get(key)
        if known is None:
            return self._record(key, hidden, input_ids, positions, forward_batch)
        if int(positions.max()) >= known.tape.positions_below:
            return self.eager(input_ids, positions, forward_batch)  # which says what is wrong
        known.fill(hidden, positions, forward_batch.out_cache_loc)
        known.tape.rewind()
        backend.set_tape(known.tape)
        known.tape.run()
        return known.output.clone()

    def _suits(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any, backend: Any) -> bool:
        """Whether this pass is of the kind that tapes hold."""
        return (
            not (self._refused or _paused)
            and isinstance(backend, PortableCpuAttnBackend)
            and backend.planned_tokens() == len(input_ids)
            and 0 < len(input_ids) <= LINEAR_ROWS
            and positions.shape == input_ids.shape == batch.out_cache_loc.shape
            and positions.dtype == batch.out_cache_loc.dtype == torch.int64
            and not getattr(self.decoder, "layers_to_capture", None)
            and not any(getattr(batch, "lora_ids", None) or ())
        )

    def _record(
        self, key: Any, hidden: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        """Run the pass eagerly and keep its tape; without one, where the model does not allow it, from then on."""
        if self._arena is None:
            self._arena = Arena()
        slots = batch.out_cache_loc
        known = _Recorded(self._arena, hidden, batch)
        known.fill(hidden, positions, slots)
        batch.out_cache_loc = known.slots
        try:
            if any(module._forward_hooks or module._forward_pre_hooks for module in self.decoder.modules()):
                raise TapeError("a module has hooks, which expect to be called")
            with tapes.recording(known.tape), _NoHiddenWork():
                known.output = self.eager(input_ids, known.positions, batch, known.hidden)
            if not isinstance(known.output, torch.Tensor):
                raise TapeError(f"its forward returns a {type(known.output).__name__}")
            known.tape.finish()
        except TapeError as reason:
            self._refused = True
            logger.info(f"forward passes of {type(self.decoder).__name__} are not replayed: {reason}")
            batch.out_cache_loc = slots
            return self.eager(input_ids, positions, batch)
        finally:
            batch.out_cache_loc = slots
        self._recorded[key] = known
        return known.output.clone()


_paused = False


@contextmanager
def paused() -> Iterator[None]:
    """Passes inside run eagerly."""
    global _paused
    _paused = True
    try:
        yield
    finally:
        _paused = False


def is_attached(model: nn.Module) -> bool:
    """Whether passes of this model are replayed, if they can be."""
    return isinstance(getattr(getattr(model, "model", None), "forward", None), ReplayedForward)


def attach(model: nn.Module) -> None:
    """Replay the passes of ``model.model`` where there is such a decoder and tapes run here."""
    decoder = getattr(model, "model", None)
    if isinstance(decoder, nn.Module) and hasattr(decoder, "embed_tokens") and tapes.can_run():
        decoder.forward = ReplayedForward(decoder)
