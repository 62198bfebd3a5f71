"""One forward pass at a time, on the scheduler object that serves, without its event loop."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from rapid_sgl.bench import BenchError
from rapid_sgl.bench.prompts import exact_prompt
from rapid_sgl.platform import replay
from rapid_sgl.retrieval.prompt import PromptBuilder
from rapid_sgl.verify.inputs import verify_input

LINEAR_ROWS = (1, 5)
WARMUPS = 2
# The last committed token and four drafts, RapidConfig's default.
VERIFY_WIDTH = 5

Pass = Callable[[], None]


class StepBench:
    """SGLang's ``Scheduler`` with the served model, holding one request whose tokens are all cached.

    Every pass runs over the first n tokens of that request and feeds its true next ones, so it writes
    into the cache what is there already, and any n can follow any other.

    Args:
        scheduler: built, but not running its event loop.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.worker = scheduler.tp_worker
        self.runner = self.worker.model_runner

    def cache(self, longest: int) -> None:
        """Prefill a prompt, so that passes over up to ``longest`` cached tokens can be timed.

        Raises:
            BenchError: that many tokens fit neither the model nor the KV pool.
        """
        needed = longest + VERIFY_WIDTH
        context, pool_size = self.runner.model_config.context_len, self.runner.max_total_num_tokens
        if needed > min(context, pool_size):
            raise BenchError(
                f"a context of {longest} needs {needed} tokens, but the model takes {context} and the KV pool "
                f"{pool_size}; use shorter contexts or raise --max-total-tokens behind `--`"
            )
        builder = PromptBuilder(self.scheduler.tokenizer)
        ids = exact_prompt(builder, needed).ids
        self.ids = torch.tensor(ids)
        self.batch = self._prefilled(ids)
        row = self.scheduler.req_to_token_pool.req_to_token[self.batch.req_pool_indices[0]]
        self.slots = row[:needed].to(torch.int64)

    def decode(self, cached: int) -> None:
        """One new token by SGLang's decode mode."""
        self._set("DECODE", cached + 1, cached, 1)
        self._forward()

    def decode_eager(self, cached: int) -> None:
        """The same by SGLang's Python, layer by layer, where ``decode`` is replayed from tape."""
        with replay.paused():
            self.decode(cached)

    def extend(self, cached: int) -> None:
        """One new token by extension of a cached prefix, as a prompt that is all but cached takes it."""
        batch = self.batch
        self._set("EXTEND", cached + 1, cached, 1)
        batch.prefix_lens, batch.extend_lens = [cached], [1]
        batch.extend_num_tokens, batch.extend_logprob_start_lens = 1, [0]
        self._forward()

    def verify(self, cached: int, width: int) -> None:
        """``width`` new tokens by a chain verify, as ``RapidWorker`` runs it."""
        self._set("TARGET_VERIFY", cached, cached, width)
        self.batch.spec_info = verify_input(self.runner, self.batch, self.batch.input_ids.view(1, width))
        self._forward()
        self.batch.spec_info = None

    def linears(self, rows: int) -> Pass:
        """All linear layers of the model and its head applied to ``rows`` rows, and nothing else."""
        weights = linear_weights(self.runner.model)
        inputs = {
            weight.shape[1]: torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
            for weight in weights
        }

        def run() -> None:
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

        return run

    def synchronize(self) -> None:
        """Wait for the device; on a CPU there is nothing to wait for."""
        torch.get_device_module(self.runner.device).synchronize()

    def _set(self, mode: str, seq_len: int, first: int, width: int) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        batch = self.batch
        device = self.slots.device
        batch.forward_mode = ForwardMode[mode]
        batch.input_ids = self.ids[first : first + width].to(device)
        batch.out_cache_loc = self.slots[first : first + width]
        batch.seq_lens_cpu = torch.tensor([seq_len])
        batch.seq_lens = batch.seq_lens_cpu.to(device)
        batch.seq_lens_sum = seq_len

    def _forward(self) -> None:
        # is_verify: logits only, nothing is sampled
        self.worker.forward_batch_generation(self.batch, is_verify=True)

    def _prefilled(self, ids: list[int]) -> Any:
        """A ``ScheduleBatch`` of one request, its tokens prefilled in chunks as the scheduler does it."""
        from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
        from sglang.srt.sampling.sampling_params import SamplingParams

        req = Req("bench-steps", "", array("q", ids), SamplingParams(max_new_tokens=1))
        req.full_untruncated_fill_ids = req.origin_input_ids
        req.logprob_start_len = -1
        scheduler = self.scheduler
        chunk = scheduler.chunked_prefill_size or len(ids)
        for start in range(0, len(ids), chunk):
            req.prefix_len = start
            req.extend_end = min(start + chunk, len(ids))
            batch = ScheduleBatch.init_new(
                [req],
                scheduler.req_to_token_pool,
                scheduler.token_to_kv_pool_allocator,
                scheduler.tree_cache,
                scheduler.model_config,
                enable_overlap=False,
                spec_algorithm=scheduler.spec_algorithm,
            )
            batch.prepare_for_extend()
            batch.input_ids = self.ids[start : req.extend_end].to(self.runner.device)
            self.worker.forward_batch_generation(batch, is_verify=True)
        return batch


def linear_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Weights [out, in] of every linear layer and of the language-model head, in the order of the pass.

    Raises:
        BenchError: the model's linear layers are quantised, so a bare matrix product says nothing of them.
    """
    from sglang.srt.layers.linear import LinearBase

    weights = [module.weight for module in model.modules() if isinstance(module, LinearBase)]
    weights.append(model.lm_head.weight)
    for weight in weights:
        if not weight.dtype.is_floating_point or weight.itemsize < 2:
            raise BenchError(
                f"linears cannot be measured on {weight.dtype} weights; serve an unquantised checkpoint"
            )
    return weights


def measure_steps(
    bench: StepBench, contexts: Sequence[int], repeats: int, update: Callable[[str], None]
) -> dict[str, Any]:
    """Medians and ranges in ms of every pass, taken in turns: ``{"decode_ms": {"128": …}, …}``.

    Args:
        contexts: cached tokens before the pass.
        repeats: timed rounds after two untimed ones.
    """
    from sglang.srt.utils import DynamicGradMode

    update("prefilling")
    with DynamicGradMode():
        bench.cache(max(contexts))
        return summary(_timed(_passes(bench, contexts), bench.synchronize, repeats, update))


def _passes(bench: StepBench, contexts: Sequence[int]) -> dict[tuple[str, int], Pass]:
    """What to time, by name and size."""
    passes: dict[tuple[str, int], Pass] = {}
    for size in contexts:
        passes["decode", size] = lambda size=size: bench.decode(size)  # type: ignore[misc]
        if replay.is_attached(bench.runner.model):
            passes["decode_eager", size] = lambda size=size: bench.decode_eager(size)  # type: ignore[misc]
        passes["extend1", size] = lambda size=size: bench.extend(size)  # type: ignore[misc]
        passes["verify1", size] = lambda size=size: bench.verify(size, 1)  # type: ignore[misc]
        passes[f"verify{VERIFY_WIDTH}", size] = lambda size=size: bench.verify(size, VERIFY_WIDTH)  # type: ignore[misc]
    for rows in LINEAR_ROWS:
        passes["linears", rows] = bench.linears(rows)
    return passes


def _timed(
    passes: dict[tuple[str, int], Pass],
    synchronize: Callable[[], None],
    repeats: int,
    update: Callable[[str], None],
) -> dict[tuple[str, int], list[float]]:
    """Times in ms, the passes taking turns."""
    times: dict[tuple[str, int], list[float]] = {key: [] for key in passes}
    for repeat in range(-WARMUPS, repeats):
        update("warming up" if repeat < 0 else f"measuring, {repeat + 1} of {repeats}")
        for key, run in passes.items():
            started = time.perf_counter()
            run()
            synchronize()
            if repeat >= 0:
                times[key].append(1e3 * (time.perf_counter() - started))
    return times


def summary(times: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    """Medians and ranges per pass from times in ms, and the ratios to a plain decode step.

    The first two ratios are taken at the largest size, the others at the smallest.
    """
    report: dict[str, Any] = {}
    ranges: dict[str, Any] = {}
    for (name, size), values in times.items():
        report.setdefault(f"{name}_ms", {})[str(size)] = round(median(values), 3)
        ranges.setdefault(name, {})[str(size)] = [round(min(values), 3), round(max(values), 3)]
    sizes = sorted(map(int, report["decode_ms"]))
    short, long = str(sizes[0]), str(sizes[-1])
    decode = report["decode_ms"]
    report["ratios"] = {
        "extend1_over_decode": round(report["extend1_ms"][long] / decode[long], 3),
        "verify5_over_decode": round(report["verify5_ms"][long] / decode[long], 3),
        "decode_over_linears": round(decode[short] / report["linears_ms"]["1"], 3),
    }
    if "decode_eager_ms" in report:
        report["ratios"]["eager_over_decode"] = round(report["decode_eager_ms"][short] / decode[short], 3)
    report["range_ms"] = ranges
    return report


def thread_facts() -> dict[str, Any]:
    """Threads of this process and the OpenMP settings that it was started with."""
    openmp = {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))}
    return {"threads": torch.get_num_threads(), "openmp": openmp}
