"""Run the step measurement in a child process that is started the way SGLang starts its scheduler.

The platform and SGLang put settings of OpenMP and other libraries into the environment while they
resolve the server's arguments; libraries read them when they are loaded. Only a process started
afterwards computes under the same conditions as a server's.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rapid_sgl.bench import BenchError


def measure_steps_in_child(
    arguments: Sequence[str], contexts: Sequence[int], repeats: int, update: Callable[[str], None]
) -> dict[str, Any]:
    """The report of ``rapid-sgl bench steps``.

    Args:
        arguments: as for ``sglang.launch_server``.
        contexts: cached tokens before a pass.
        repeats: timed rounds.
        update: told what runs now.

    Raises:
        BenchError: the measurement cannot be made as asked, or its process died.
    """
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()
    server_args = prepare_server_args(list(arguments))
    if server_args.tp_size * server_args.pp_size * server_args.dp_size > 1:
        raise BenchError("bench steps runs in one process; leave out --tp-size, --pp-size and --dp-size")
    server_args.resolve_once()
    _set_envs_and_config(server_args)
    server_args.check_server_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    job = (server_args, PortArgs.init_new(server_args), list(contexts), repeats)
    child = context.Process(target=_child, args=(theirs, *job), daemon=True)
    child.start()
    theirs.close()
    while True:
        try:
            kind, value = ours.recv()
        except EOFError:
            child.join()
            raise BenchError(
                f"the measuring process ended with status {child.exitcode}; its messages are above"
            ) from None
        if kind == "report":
            child.join()
            report: dict[str, Any] = value
            return report
        if kind == "error":
            raise BenchError(value)
        update(value)


def _child(pipe: Connection, server_args: Any, ports: Any, contexts: list[int], repeats: int) -> None:
    """Build the scheduler as ``run_scheduler_process`` does, measure instead of serving, send the report."""
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    from rapid_sgl.bench.environment import environment
    from rapid_sgl.bench.steps import StepBench, measure_steps, thread_facts

    load_plugins()
    rank = spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
    configure_scheduler_process(server_args, 0)
    bench = StepBench(Scheduler(server_args, ports))
    try:
        report = measure_steps(bench, contexts, repeats, lambda text: pipe.send(("progress", text)))
    except BenchError as error:
        pipe.send(("error", str(error)))
        return
    facts = {**environment(server_args.model_path), **thread_facts()}
    pipe.send(("report", {"environment": facts, **report}))
