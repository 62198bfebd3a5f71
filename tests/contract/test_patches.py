"""SGLang's side of the seams: each patched symbol exists and is still called the way the patch expects."""

from __future__ import annotations

import inspect
import pkgutil
from pathlib import Path

import pytest
import torch
from rapid_sgl.server_patches import (
    auto_spans,
    fused_linear,
    kv_release,
    meta_info,
    replay,
    request_check,
    row_writer,
    seeded_hash,
    server_info,
    spec_baselines,
)

TARGETS = [
    ("auto_spans", auto_spans.ONE_TARGET),
    ("auto_spans", auto_spans.BATCH_TARGET),
    ("auto_spans", auto_spans.RESPONSE_TARGET),
    ("fused_linear", fused_linear.LINEAR_TARGET),
    ("fused_linear", fused_linear.HEAD_TARGET),
    ("kv_release", kv_release.TARGET),
    ("meta_info", meta_info.OUTPUT_TARGET),
    ("meta_info", meta_info.RESPONSE_TARGET),
    ("replay", replay.LOAD_TARGET),
    ("request_check", request_check.TARGET),
    ("row_writer", row_writer.TARGET),
    ("seeded_hash", seeded_hash.TARGET),
    ("server_info", server_info.TARGET),
    *(("spec_baselines", target) for target in spec_baselines.REPLACED),
    ("spec_baselines", spec_baselines.BACKEND_TARGET),
]


def original(target):
    return inspect.unwrap(pkgutil.resolve_name(target))


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_target_exists_and_is_in_the_ledger(name, target):
    assert callable(original(target))
    ledger = (Path(row_writer.__file__).parent / "LEDGER.md").read_text()
    assert f"`{name}.py`" in ledger and target.rsplit(".", 1)[1] in ledger


def test_every_patch_file_is_checked_here():
    files = {path.stem for path in Path(row_writer.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {name for name, _ in TARGETS}


def parameters(target):
    return list(inspect.signature(original(target)).parameters)


def test_signatures():
    assert parameters(row_writer.TARGET) == list(inspect.signature(row_writer.write_rows).parameters)
    assert parameters(kv_release.TARGET)[0] == "req"
    assert parameters(replay.LOAD_TARGET) == ["self"]
    assert parameters(server_info.TARGET) == ["self", "state"]
    assert parameters(fused_linear.LINEAR_TARGET) == ["self", "layer", "x", "bias"]
    assert parameters(fused_linear.HEAD_TARGET)[:4] == ["self", "hidden_states", "lm_head", "embedding_bias"]
    assert parameters(meta_info.OUTPUT_TARGET)[0] == "self"
    assert parameters(meta_info.RESPONSE_TARGET)[:5] == [
        "self",
        "meta_info",
        "state",
        "customized_info",
        "index",
    ]
    assert parameters(request_check.TARGET)[:4] == ["self", "obj", "input_text", "input_ids"]
    assert parameters(auto_spans.ONE_TARGET) == ["self", "tokenized_obj"]
    assert parameters(auto_spans.BATCH_TARGET) == ["self", "tokenized_objs"]
    assert inspect.iscoroutinefunction(original(auto_spans.ONE_TARGET))
    assert inspect.iscoroutinefunction(original(auto_spans.BATCH_TARGET))


def test_what_auto_spans_reads_and_writes():
    """Fields of the request on its way to the scheduler, and of the state that its client waits on."""
    from dataclasses import fields

    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = {"rid", "input_ids", "input_embeds", "mm_inputs", "session_params", "lora_id"}
    assert request | {"sampling_params", "extra_key", "cache_salt"} <= set(
        TokenizedGenerateReqInput.__struct_fields__
    )
    assert {"custom_params", "max_new_tokens"} <= set(SamplingParams.__struct_fields__)
    assert {"abort_sent", "obj"} <= {field.name for field in fields(ReqState)}
    assert parameters(f"{auto_spans.MANAGER}.abort_request")[:2] == ["self", "rid"]
    # every request goes to the scheduler through the two patched methods
    source = inspect.getsource(inspect.unwrap(TokenizerManager._handle_batch_request))
    source += inspect.getsource(inspect.unwrap(TokenizerManager.generate_request))
    assert source.count("_dispatch_to_scheduler(") == 0 and source.count("self._send_") >= 5


def test_spec_baselines_take_what_sglang_passes():
    """Each replacement has the parameters of the function that it stands in for, under the same names."""
    for target, function in spec_baselines.REPLACED.items():
        assert parameters(target) == list(inspect.signature(function).parameters), target
    theirs = list(inspect.signature(spec_baselines.create_backend).parameters)[2:]
    assert parameters(spec_baselines.BACKEND_TARGET)[1:] == theirs


def test_spec_baselines_fill_what_sglang_lacks():
    """The names that are None without a GPU exist, are called under these parameters, and no hook is needed."""
    import importlib

    for path, names in spec_baselines.ABSENT.items():
        module = importlib.import_module(path)
        assert all(name in module.__all__ for name in names)
    spec_baselines.provide_kernels()
    from sglang.kernels.ops.speculative import reconstruct_tree
    from sglang.srt.speculative import eagle_utils

    wanted = parameters(f"{spec_baselines.OPS}.reconstruct_tree.reconstruct_indices_from_tree_mask_func")
    ours = list(inspect.signature(reconstruct_tree.reconstruct_indices_from_tree_mask).parameters)
    assert len(ours) == len(wanted)  # SGLang passes them by position
    source = inspect.getsource(eagle_utils.eagle_sample)
    for name in inspect.signature(spec_baselines.spec_ops.tree_sampling).parameters:
        assert f"{name}=" in source


def test_row_writer_writes_what_the_kernel_would():
    table = torch.zeros(4, 10, dtype=torch.int32)
    start, end = torch.tensor([2, 0, 5]), torch.tensor([4, 3, 5])
    row_writer.write_rows(torch.tensor([3, 1, 2]), table, start, end, torch.arange(101, 106), 3)
    wanted = torch.zeros(4, 10, dtype=torch.int32)
    wanted[3, 2:4] = torch.tensor([101, 102])
    wanted[1, 0:3] = torch.tensor([103, 104, 105])
    assert torch.equal(table, wanted)


def test_seeded_hash_is_murmur3():
    from sklearn.utils import murmurhash3_32

    seeds, positions, columns = (
        torch.tensor([0, 7, -1, 2**40 + 5]),
        torch.tensor([0, 9, 4000, 1]),
        torch.arange(5),
    )
    got = seeded_hash.hash_columns(seeds.to(torch.uint64), positions, columns)
    assert parameters(seeded_hash.TARGET) == list(inspect.signature(seeded_hash.hash_columns).parameters)
    for i, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for j in columns.tolist():
            key = (
                (seed % 2**64).to_bytes(8, "little")
                + position.to_bytes(4, "little")
                + j.to_bytes(4, "little")
            )
            assert got[i, j].item() == murmurhash3_32(key, seed=0, positive=True)


def test_algorithm_has_every_method_of_the_enum():
    """``CustomSpecAlgo`` lacks some methods that the scheduler calls on ``SpeculativeAlgorithm``; RAPID has them."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from rapid_sgl.algorithm import RapidAlgorithm

    public = {
        name for name, value in vars(SpeculativeAlgorithm).items() if callable(value) and name[0] != "_"
    }
    registration = {"from_string", "register", "get_platform_worker_cls"}
    assert public - registration <= set(dir(RapidAlgorithm))


def test_worker_has_every_method_of_the_schema():
    """Abstract or called by the scheduler: the worker inherits or defines all of ``BaseSpecWorker``."""
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

    from rapid_sgl.worker import RapidWorker

    assert issubclass(RapidWorker, BaseSpecWorker)
    assert not RapidWorker.__abstractmethods__
