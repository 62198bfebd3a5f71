"""SGLang entry points. SGLang calls these in every process; they only register.

SGLang logs and swallows what is raised here, so hard checks live in
``RapidAlgorithm.validate`` and in the worker's constructor.
"""

from __future__ import annotations


def register() -> None:
    """``sglang.srt.plugins``: register the RAPID algorithm and the hooks it needs."""
    from rapid_sgl import algorithm, server_patches

    algorithm.register()
    server_patches.register()


def portable_cpu_platform() -> str | None:
    """``sglang.srt.platforms``: the portable CPU platform, or None where another device serves."""
    from rapid_sgl.platform.detect import portable_cpu_wanted

    return "rapid_sgl.platform.cpu.PortableCpuPlatform" if portable_cpu_wanted() else None
