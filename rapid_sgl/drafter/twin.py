"""The quantised twin: the served checkpoint a second time, with cheaper weights, as the drafter.

Its keys and values are close enough to the target's that it drafts over the target's views and KV pool.

On a CPU the twin is int8, one scale per output, weights only (``platform/kernels_int8.py``). It is made from the target in
memory and shares with it everything but the weights of linear layers and of the language-model head. Measured with the
embedded model on AVX-512, 1 / 8 rows: all its linear layers take 5.5 / 12.8 ms of one thread, in float32 19.5 / 29.0; a draft step
over 1024 tokens takes 0.54 / 0.67 of the same-weights step on one thread, 0.64 / 0.71 on two of a busy machine. torch's
dynamic int8 (fbgemm) takes 6.3 / 8.4 ms, but rounds activations too, by the largest of the whole batch: fewer drafts
are accepted (argmax agreement 0.887 against 0.900; same weights 0.917), and they would depend on the other requests.

On a GPU SGLang loads the checkpoint again with one of its online quantisations (written against its interface, not yet
run on a GPU).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from rapid_sgl.config import RapidOptionError
from rapid_sgl.platform import kernels_int8, replay

# What a GPU twin is: SGLang's --quantization value and, for humming, its configuration. SGLang depends on humming, which
# quantises weights only; w8a8_int8 reads int8 checkpoints but does not make them. 128 columns share an int4 scale, as in
# most published int4 checkpoints.
ONLINE_QUANTIZATION: dict[str, tuple[str, dict[str, Any] | None]] = {
    "int8": ("humming", {"dtype": "int8"}),
    "fp8": ("fp8", None),
    "int4": ("humming", {"dtype": "int4", "group_size": 128}),
}
WEIGHTS = ("same", *ONLINE_QUANTIZATION)


def make_twin(runner: Any, weights: str) -> nn.Module:
    """The module that drafts in the place of ``runner.model``; that model itself for ``same``.

    Args:
        runner: the target's ``ModelRunner``, its weights loaded. Call before SGLang sizes the KV pool, which then leaves
            room for the twin.
        weights: one of ``WEIGHTS``.

    Raises:
        RapidOptionError: the device, the model or the checkpoint does not allow these weights.
    """
    if weights not in WEIGHTS:
        raise RapidOptionError(f"rapid_drafter_weights={weights!r} is not one of {', '.join(WEIGHTS)}")
    if weights == "same":
        return runner.model
    if runner.device == "cpu" and weights != "int8":
        raise RapidOptionError(f"rapid_drafter_weights={weights!r} needs a GPU; on a CPU use int8 or same")
    quantised = runner.model_config.quantization
    if quantised is not None:
        raise _refusal(weights, f"the checkpoint is already quantised ({quantised})")
    if runner.device != "cpu":
        return _loaded_twin(runner, weights)
    twin = int8_twin(runner.model)
    replay.attach(twin)  # the copied decoder would replay the target's passes
    return twin


def refresh(twin: nn.Module, model: nn.Module) -> bool:
    """Make the twin follow the target, whose weights have changed; False where it cannot (it was loaded, not made)."""
    if twin is model:
        return True
    layers = [
        (name, layer)
        for name, layer in twin.named_modules()
        if isinstance(getattr(layer, "quant_method", None), Int8Method)
    ]
    for name, layer in layers:
        _fill(layer, model.get_submodule(name), name)
    return bool(layers)


def twin_bytes(twin: nn.Module, model: nn.Module) -> int:
    """Memory that the twin adds to the model's, in bytes."""
    known = {tensor.data_ptr() for tensor in _tensors(model)}
    added = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(twin)}
    return sum(size for address, size in added.items() if address not in known)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _refusal(weights: str, reason: str) -> RapidOptionError:
    return RapidOptionError(
        f"rapid_drafter_weights={weights!r} is not possible: {reason}; use rapid_drafter_weights=same"
    )


class TwinUpdater:
    """Stands beside the target's ``ModelRunner`` when SGLang updates weights, and makes the twin follow.

    SGLang calls the target first. Updates from tensors or from another process group come in a session of several, so
    the twin follows at its end.

    Args:
        twin: what ``make_twin`` returned.
        runner: the target's ``ModelRunner``.
    """

    def __init__(self, twin: nn.Module, runner: Any):
        self.twin, self.runner = twin, runner

    @property
    def weight_updater(self) -> TwinUpdater:
        """SGLang looks for the methods below on this attribute of a runner."""
        return self

    def check_weights(self, **request: Any) -> None:
        """No checksums of its own: the twin holds what the target holds, rounded."""

    def begin_weight_update(self) -> None:
        """Nothing to undo."""

    def end_weight_update(self, run_post_load: bool) -> None:
        """The target's weights are complete."""
        refresh(self.twin, self.runner.model)

    def _follow(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        if refresh(self.twin, self.runner.model):
            return True, "The drafter's weights follow."
        return False, (
            "The target's weights are updated, but the drafter's quantised weights were loaded from the first checkpoint and "
            "cannot follow; answers stay right, drafts get worse. Restart the server, or serve with "
            "rapid_drafter_weights=same."
        )

    def _follow_later(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        return True, "The drafter's weights follow at the end of the session."

    update_weights_from_disk = update_weights_from_ipc = _follow
    update_weights_from_tensor = load_weights_from_distributed = _follow_later


class Int8Method:
    """SGLang's quant method of the twin's linear layers and head: int8 weights, float32 arithmetic."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., dim] times the layer's weight, plus bias, in x's dtype."""
        out = kernels_int8.linear(x, layer.weight_int8, layer.weight_scale)
        if bias is not None:
            out += bias
        return out.to(x.dtype)


def int8_twin(model: nn.Module) -> nn.Module:
    """A copy of the module tree in which linear layers and the head hold int8 weights.

    Modules without a linear layer inside (norms, attention, embedding) are the model's own objects; attention layers keep
    their ``layer_id`` and so read and write the same KV pool. Of the others only the shell is copied.

    Raises:
        RapidOptionError: a layer is not a plain linear layer.
    """
    return _Int8Copy().of(model, "")


class _Int8Copy:
    """Walks a module tree; a module met twice is copied once."""

    def __init__(self) -> None:
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
        from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
        from sglang.srt.lora.layers import BaseLayerWithLoRA

        self.linear = LinearBase
        self.plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        self.refused = (FusedMoE, BaseLayerWithLoRA)
        self.copies: dict[tuple[nn.Module, bool], nn.Module] = {}

    def of(self, module: nn.Module, name: str) -> nn.Module:
        """The twin of ``module``: the module itself where nothing in it changes."""
        # a tied head is the embedding under a second name, and only the head is quantised
        key = (module, _is_head(name))
        if key not in self.copies:
            if isinstance(module, self.refused):
                raise _refusal(
                    "int8", f"{name} is a {type(module).__name__} layer, which has no int8 form here"
                )
            quantise = _is_head(name) or isinstance(module, self.linear)
            self.copies[key] = self._int8(module, name) if quantise else self._shell(module, name)
        return self.copies[key]

    def _shell(self, module: nn.Module, name: str) -> nn.Module:
        children = {
            key: child if child is None else self.of(child, f"{name}.{key}" if name else key)
            for key, child in module._modules.items()
        }
        if all(children[key] is child for key, child in module._modules.items()):
            return module
        copied = _copied(module)
        copied._modules = children
        return copied

    def _int8(self, module: nn.Module, name: str) -> nn.Module:
        method = getattr(module, "quant_method", None)
        if not isinstance(method, self.plain):
            raise _refusal("int8", f"{name} computes with {type(method).__name__}, not with plain weights")
        weight = module.weight
        if weight.dim() != 2 or not weight.is_floating_point() or weight.itemsize < 2:
            raise _refusal("int8", f"{name} has {weight.dtype} weights of shape {tuple(weight.shape)}")
        copied: Any = _copied(module)
        copied.quant_method = Int8Method()
        outputs, dim = weight.shape
        copied.register_buffer("weight_int8", torch.empty(outputs, dim, dtype=torch.int8), persistent=False)
        copied.register_buffer("weight_scale", torch.empty(outputs), persistent=False)
        _fill(copied, module, name)
        return copied


def _copied(module: nn.Module) -> nn.Module:
    """A shallow copy that can be given other children, parameters and buffers; bound methods are bound to it."""
    copied = copy.copy(module)
    attributes = vars(copied)
    for key in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        attributes[key] = copy.copy(attributes[key])
    for key, value in attributes.items():
        if isinstance(value, MethodType) and value.__self__ is module:
            attributes[key] = MethodType(value.__func__, copied)
    return copied


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"


def _fill(layer: Any, source: Any, name: str) -> None:
    """Share the parameters of ``source`` and quantise its weight into ``layer``."""
    layer._parameters = dict(source._parameters)
    if _is_head(name):
        # SGLang's logits processor asks a head's quant method only where there is no weight to multiply with
        del layer._parameters["weight"]
    weight, scale = kernels_int8.quantize(source.weight.detach())
    layer.weight_int8.copy_(weight)
    layer.weight_scale.copy_(scale)


def online_model_config(model_config: Any, weights: str) -> Any:
    """The target's ``ModelConfig`` with the quantisation of a GPU twin."""
    config = copy.copy(model_config)
    config.quantization = ONLINE_QUANTIZATION[weights][0]
    config._verify_quantization()
    return config


def online_environment(weights: str) -> Any:
    """A context in which SGLang's online quantisation makes these weights."""
    from sglang.srt.environ import envs

    settings = ONLINE_QUANTIZATION[weights][1]
    if settings is None:
        return nullcontext()
    return envs.SGLANG_HUMMING_ONLINE_QUANT_CONFIG.override(json.dumps(settings))


def _loaded_twin(runner: Any, weights: str) -> nn.Module:
    """Load the checkpoint again through SGLang's loader; no KV pool is built for it."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.model_loader import get_model

    try:
        with online_environment(weights):
            return get_model(
                model_config=online_model_config(runner.model_config, weights),
                load_config=copy.copy(runner.load_config),
                device_config=DeviceConfig(runner.device, runner.gpu_id),
            )
    except (ValueError, ImportError) as error:  # what SGLang raises for an unfit GPU, dtype or checkpoint
        raise _refusal(weights, str(error)) from error
