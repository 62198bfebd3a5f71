"""The portable CPU platform: when it is chosen, and which server arguments it fills in."""

from types import SimpleNamespace

from rapid_sgl.platform.detect import portable_cpu_wanted


def defaults(**given):
    from rapid_sgl.platform.cpu import PortableCpuPlatform

    blank = {
        "attention_backend": None,
        "dtype": "auto",
        "mem_fraction_static": None,
        "chunked_prefill_size": None,
        "disable_overlap_schedule": False,
        "sleep_on_idle": False,
    }
    args = SimpleNamespace(**{**blank, **given})
    PortableCpuPlatform().apply_server_args_defaults(args)
    return args


def test_fills_in_what_is_open():
    args = defaults()
    assert (args.attention_backend, args.dtype) == ("rapid_cpu", "float32")
    assert args.disable_overlap_schedule and args.sleep_on_idle
    # SGLang's own CPU rule runs first and names a backend that needs AMX kernels
    assert defaults(attention_backend="intel_amx").attention_backend == "rapid_cpu"


def test_keeps_what_the_user_chose():
    args = defaults(
        attention_backend="torch_native", dtype="bfloat16", mem_fraction_static=0.3, chunked_prefill_size=256
    )
    assert (args.attention_backend, args.dtype) == ("torch_native", "bfloat16")
    assert (args.mem_fraction_static, args.chunked_prefill_size) == (0.3, 256)


def test_steps_aside(monkeypatch):
    import torch

    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert portable_cpu_wanted()
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert not portable_cpu_wanted()
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    assert not portable_cpu_wanted()
