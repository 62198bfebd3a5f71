"""An ``sgl.Engine`` of this process as the backend of ``sgl.function`` programs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from rapid_sgl.lang.backend import RapidBackend, chat_template
from rapid_sgl.lang.passages import Passages
from rapid_sgl.retrieval.pipeline import RetrievalOptions


class RapidEngine(RapidBackend):
    """Programs on an engine, without HTTP; use as a context manager or ``close`` it.

        engine = sgl.Engine(model_path=…, speculative_algorithm="RAPID")
        with RapidEngine(engine, rapid_draft_length=3) as backend:
            state = program.run(question="…", backend=backend)
        engine.shutdown()

    Until it is closed a thread of its own runs the engine's event loop, because programs call from many
    threads; the engine's blocking methods (``engine.generate``) work again afterwards.

    Args:
        engine: an ``sgl.Engine`` with a tokenizer.
        chat_template_name, retrieval, options: as for ``RapidEndpoint``.

    Raises:
        RapidOptionError: a wrong option.
    """

    def __init__(
        self,
        engine: Any,
        *,
        chat_template_name: str | None = None,
        retrieval: RetrievalOptions | None = None,
        **options: Any,
    ) -> None:
        manager = engine.tokenizer_manager
        super().__init__(Passages(lambda: manager.tokenizer, retrieval), options)
        self.engine = engine
        self.model_info = engine.get_model_info()
        own = str(manager.tokenizer.chat_template or "")
        self.chat_template = chat_template(chat_template_name, self.model_info["model_path"], own)
        self._thread = threading.Thread(target=engine.loop.run_forever, name="rapid-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> RapidEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the event loop back to the engine; safe to call twice."""
        if self._thread.is_alive():
            self.engine.loop.call_soon_threadsafe(self.engine.loop.stop)
            self._thread.join()

    def flush_cache(self) -> None:
        self._wait(self.engine.tokenizer_manager.flush_cache())

    def get_server_info(self) -> dict[str, Any]:
        """Model facts and the scheduler's internal states."""
        states = self._wait(self.engine.tokenizer_manager.get_internal_state())
        return {**self.model_info, "internal_states": states}

    def _send(self, body: dict[str, Any]) -> Any:
        return self._wait(anext(self._replies(body)))

    def _stream(self, body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        replies, seen = self._replies({**body, "stream": True}), 0
        incremental = self.engine.tokenizer_manager.server_args.incremental_streaming_output
        while (reply := self._wait(anext(replies, None))) is not None:
            text = reply["text"]
            yield text if incremental else text[seen:], reply["meta_info"]
            seen = len(text)

    def _replies(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        return self.engine.tokenizer_manager.generate_request(GenerateReqInput(**body), None)

    def _wait(self, awaitable: Any) -> Any:
        """The result of something that the engine's loop does; called from any other thread."""

        async def result() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(result(), self.engine.loop).result()
