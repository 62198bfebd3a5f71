"""The int8 twin of a small tree of SGLang layers, its kernel against float64, and what a GPU twin would be."""

from __future__ import annotations

import inspect
import json
import re
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from torch import nn

from rapid_sgl.config import RapidOptionError
from rapid_sgl.drafter import twin as twins
from rapid_sgl.platform import kernels_int8, ops

HIDDEN, INNER, VOCAB = 64, 96, 128


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Embedding(nn.Embedding):
    """A ``VocabParallelEmbedding`` without its process groups."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(VOCAB, HIDDEN, dtype=dtype)
        self.quant_method = UnquantizedEmbeddingMethod()
        self.requires_grad_(False)


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.norm = RMSNorm(HIDDEN)
        self.up = ReplicatedLinear(HIDDEN, INNER, bias=True, params_dtype=dtype)
        self.down = ReplicatedLinear(INNER, HIDDEN, bias=False, params_dtype=dtype)
        for layer in (self.up, self.down):
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.2)
        self.run = self.compute  # models pick such a form when they are built

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        inner, _ = self.up(self.norm.forward_native(x).to(x.dtype))
        return x + self.down(inner.relu())[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class Model(nn.Module):
    """Embedding, two blocks and a head tied to the embedding, as in SGLang's Llama."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed_tokens = Embedding(dtype)
        self.layers = nn.ModuleList([Block(dtype), Block(dtype)])
        self.lm_head = self.embed_tokens
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        # the path that a served model takes: SGLang's function inside the platform's hook
        processor = SimpleNamespace(use_fp32_lm_head=False, rl_on_policy_target=None)
        return ops.lm_head_logits(LogitsProcessor._compute_lm_head, processor, x, self.lm_head)


LINEARS = [f"layers.{i}.{name}" for i in (0, 1) for name in ("up", "down")]
IDS = torch.arange(5)


def runner_of(model: nn.Module, device: str = "cpu", quantization: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        model=model, device=device, model_config=SimpleNamespace(quantization=quantization)
    )


def test_quantize_rounds_to_nearest():
    weight = torch.randn(7, 33)
    weight[3] = 0
    q, scale = kernels_int8.quantize(weight)
    assert q.dtype == torch.int8 and scale.dtype == torch.float32
    assert ((q.float() * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()
    assert (q.abs().amax(1)[[0, 1, 2, 4]] == 127).all(), "the whole range is used"
    assert (q[3] == 0).all()


@pytest.mark.parametrize("outputs, dim", [(8, 16), (72, 64), (960, 576), (40, 1536), (12, 40)])
def test_int8_linear(outputs, dim):
    q, scale = kernels_int8.quantize(torch.randn(outputs, dim))
    x = torch.randn(9, dim)
    want = (x.double() @ (q.double() * scale.double()[:, None]).T).float()
    torch.testing.assert_close(kernels_int8.linear(x, q, scale), want, rtol=1e-4, atol=1e-4 * dim**0.5)
    assert kernels_int8.linear(x.view(3, 3, dim), q, scale).shape == (3, 3, outputs)
    assert kernels_int8.linear(x[:0], q, scale).shape == (0, outputs)
    half = x.bfloat16()
    assert torch.equal(kernels_int8.linear(half, q, scale), kernels_int8.linear(half.float(), q, scale))


def test_rows_do_not_depend_on_their_batch():
    q, scale = kernels_int8.quantize(torch.randn(64, 576))
    x = torch.randn(9, 576)
    together = kernels_int8.linear(x, q, scale)
    for rows in range(1, 9):
        assert torch.equal(kernels_int8.linear(x[:rows], q, scale), together[:rows])
        assert torch.equal(kernels_int8.linear(x[-rows:], q, scale), together[-rows:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_twin_computes_with_rounded_weights(dtype):
    model = Model(dtype)
    twin = twins.make_twin(runner_of(model), "int8")
    got = twin(IDS)
    assert got.dtype == dtype
    rounded = Model(dtype)
    rounded.load_state_dict(model.state_dict())
    rounded.lm_head = Embedding(dtype)  # the head is rounded, the embedding is not
    for name in [*LINEARS, "lm_head"]:
        layer = twin.get_submodule(name)
        rounded.get_submodule(name).weight.copy_(layer.weight_int8 * layer.weight_scale[:, None])
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.05, "atol": 1.0}
    torch.testing.assert_close(got, rounded(IDS), **tolerance)
    assert not torch.equal(got, model(IDS)), "it must be the twin that ran"


def test_twin_leaves_the_target_alone():
    model = Model()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    addresses = {name: value.data_ptr() for name, value in model.state_dict().items()}
    before = model(IDS)
    twin = twins.make_twin(runner_of(model), "int8")
    twin(IDS)
    assert torch.equal(model(IDS), before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]) and value.data_ptr() == addresses[name]
    own = [buffer for name, buffer in twin.named_buffers() if name.rpartition(".")[2].startswith("weight_")]
    assert len(own) == 2 * (len(LINEARS) + 1)
    storages = {value.untyped_storage().data_ptr() for value in model.state_dict().values()}
    assert not storages & {buffer.untyped_storage().data_ptr() for buffer in own}


def test_twin_shares_everything_else():
    model = Model()
    twin = twins.make_twin(runner_of(model), "int8")
    assert twin.embed_tokens is model.embed_tokens and twin.lm_head is not model.lm_head
    assert twin.layers[0] is not model.layers[0] and twin.layers[0].norm is model.layers[0].norm
    assert twin.layers[1].up.bias is model.layers[1].up.bias
    sizes = {"up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    added = sum(
        outputs * dim + 4 * outputs for outputs, dim in [*sizes.values(), *sizes.values(), (VOCAB, HIDDEN)]
    )
    assert twins.twin_bytes(twin, model) == added
    assert twins.make_twin(runner_of(model), "same") is model and twins.twin_bytes(model, model) == 0


@pytest.mark.parametrize("replace", [False, True])
def test_twin_follows_an_update(replace):
    """As weight loaders do it, in place, and as some quant methods do it, with a new parameter."""
    model = Model()
    twin = twins.make_twin(runner_of(model), "int8")
    runner = runner_of(model)
    for layer in (model.layers[0].up, model.layers[1].down, model.embed_tokens):
        weight = torch.randn_like(layer.weight)
        if replace:
            layer.weight = nn.Parameter(weight, requires_grad=False)
        else:
            layer.weight.data.copy_(weight)
    fresh = twins.make_twin(runner, "int8")(IDS)
    assert not torch.equal(twin(IDS), fresh)
    updater = twins.TwinUpdater(twin, runner)
    assert updater.weight_updater.update_weights_from_disk("path", "auto")[0]
    assert torch.equal(twin(IDS), fresh)
    model.layers[0].up.bias.data.add_(1)
    assert torch.equal(twin(IDS), twins.make_twin(runner, "int8")(IDS)), "what is shared follows by itself"


def test_session_updates_follow_at_the_end():
    model = Model()
    twin = twins.make_twin(runner_of(model), "int8")
    updater = twins.TwinUpdater(twin, runner_of(model)).weight_updater
    updater.begin_weight_update()
    model.layers[0].up.weight.data.mul_(-1)
    assert updater.update_weights_from_tensor(named_tensors=[], load_format=None)[0]
    updater.end_weight_update(run_post_load=False)
    assert torch.equal(twin(IDS), twins.make_twin(runner_of(model), "int8")(IDS))


def test_loaded_twin_says_that_it_cannot_follow():
    updater = twins.TwinUpdater(Model(), runner_of(Model()))
    done, message = updater.update_weights_from_disk("path", "auto")
    assert not done and "rapid_drafter_weights=same" in message


def test_updater_has_what_sglang_calls():
    from sglang.srt.managers.scheduler_components import weight_updater

    called = set(re.findall(r"\brunner\.weight_updater\.(\w+)\(", inspect.getsource(weight_updater)))
    assert {"update_weights_from_disk", "end_weight_update"} <= called
    for name in called:
        assert callable(getattr(twins.TwinUpdater, name)), name


class TestRefusals:
    def refused(self, model: nn.Module, weights: str = "int8", **facts: str) -> str:
        with pytest.raises(RapidOptionError) as error:
            twins.make_twin(runner_of(model, **facts), weights)
        return str(error.value)

    def test_unknown_value(self):
        assert "'int3' is not one of same, int8, fp8, int4" in self.refused(Model(), "int3")

    @pytest.mark.parametrize("weights", ["fp8", "int4"])
    def test_gpu_weights_on_a_cpu(self, weights):
        assert f"'{weights}' needs a GPU; on a CPU use int8 or same" in self.refused(Model(), weights)

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_quantised_checkpoint(self, device):
        message = self.refused(Model(), device=device, quantization="awq")
        assert "already quantised (awq)" in message and "rapid_drafter_weights=same" in message

    def test_layer_with_another_quant_method(self):
        from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config, W8A8Int8LinearMethod

        model = Model()
        model.layers[1].up.quant_method = W8A8Int8LinearMethod(W8A8Int8Config())
        assert "layers.1.up computes with W8A8Int8LinearMethod" in self.refused(model)

    def test_layer_with_packed_weights(self):
        model = Model()
        model.layers[0].down.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
        assert "layers.0.down has torch.int8 weights" in self.refused(model)

    def test_experts(self):
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

        class Experts(FusedMoE):
            def __init__(self) -> None:
                nn.Module.__init__(self)

        model = Model()
        model.layers[0].experts = Experts()
        assert "layers.0.experts is a Experts layer" in self.refused(model)


class TestOnlineQuantization:
    """Which quantisation SGLang resolves for a GPU twin; loading one needs a GPU."""

    @pytest.fixture
    def model_config(self, tmp_path):
        from sglang.srt.configs.model_config import ModelConfig

        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ModelConfig(str(tmp_path), dtype="bfloat16")

    def resolved(self, model_config, weights):
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.weight_utils import get_quant_config

        config = twins.online_model_config(model_config, weights)
        assert model_config.quantization is None, "the target's configuration stays"
        return get_quant_config(config, LoadConfig(), {})

    def test_fp8(self, model_config):
        resolved = self.resolved(model_config, "fp8")
        assert resolved.get_name() == "fp8" and not resolved.is_checkpoint_fp8_serialized

    @pytest.mark.parametrize("weights, dtype, group", [("int8", "uint8", 0), ("int4", "uint4", 128)])
    def test_humming(self, model_config, weights, dtype, group):
        resolved = self.resolved(model_config, weights)
        with twins.online_environment(weights):
            layer = resolved.get_quant_config_for_layer("model.layers.0.mlp.gate_up_proj", "linear")
        assert layer.is_online_quant and str(layer.weight_schema.b_dtype) == dtype
        assert layer.weight_schema.weight_scale_group_size == group
        assert layer.input_schema.a_dtype is None, "activations stay as they are"
        assert resolved.get_quant_config_for_layer("model.layers.0.mlp.gate_up_proj", "linear") is None
