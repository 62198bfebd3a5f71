"""Is the portable CPU platform the right one for this machine?"""

from __future__ import annotations

import os


def portable_cpu_wanted() -> bool:
    """True when no accelerator is present and SGLang's in-tree CPU mode was not asked for.

    The in-tree mode (``SGLANG_USE_CPU_ENGINE=1``) needs kernels that the package
    index does not carry, so it has to be an explicit choice.
    """
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return False
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is None
