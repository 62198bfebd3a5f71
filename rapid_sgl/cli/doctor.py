"""``rapid-sgl doctor``: is everything that RAPID needs in place, and if not, what to do."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata

from rapid_sgl.cli import options
from rapid_sgl.config import RapidConfig, RapidOptionError

DISTRIBUTION = "rapid-sgl"
ENTRY_POINTS = (("sglang.srt.plugins", "rapid"), ("sglang.srt.platforms", "rapid_cpu"))
REINSTALL = "reinstall with `uv pip install --reinstall-package rapid-sgl rapid-sgl`"

DESCRIPTION = """\
Check the installation: package versions, the plugin's entry points and hooks inside the
installed SGLang, the platform that will serve, the embedded model. Exit status 0 when all is
well, 1 when something is off; each problem comes with its fix.

example:
  rapid-sgl doctor --json
"""


@dataclass(frozen=True)
class Check:
    """One line of the report; ``fix`` is set exactly when ``ok`` is False."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def main(argv: Sequence[str]) -> int:
    """Returns 0 when every check passes, else 1."""
    parser = options.Parser(prog="rapid-sgl doctor", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(list(argv))
    from rapid_sgl.cli.progress import Status

    with Status("loading SGLang") as status, _quiet():
        checks = run_checks(status.update)
    ok = all(check.ok for check in checks)
    if args.json:
        print(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}))
        return 0 if ok else 1
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{'ok ' if check.ok else 'BAD'}  {check.name:<{width}}  {check.detail}")
        if check.fix:
            print(f"     {'':<{width}}  fix: {check.fix}")
    return 0 if ok else 1


def run_checks(update: Callable[[str], None]) -> list[Check]:
    """Every check, in the order in which a problem is best read."""
    checks = [_python(), *_packages(), _environment(), *_entry_points()]
    if any(check.name == "sglang" and not check.ok for check in checks):
        return [*checks, _model(), _machine()]  # the rest is about the inside of a matching SGLang
    return [*checks, _platform(), _algorithm(update), *_hooks(), _model(), _machine()]


def _python() -> Check:
    return Check("python", True, f"{platform.python_version()} ({sys.executable})")


def _packages() -> list[Check]:
    """Each dependency that rapid-sgl's metadata names, against what is installed."""
    from packaging.requirements import Requirement

    checks = []
    for text in metadata.requires(DISTRIBUTION) or []:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        install = f"`uv pip install '{wanted.name}{wanted.specifier}'`"
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            checks.append(Check(wanted.name, False, "not installed", install))
            continue
        matches = wanted.specifier.contains(version, prereleases=True)
        expected = f", expected {wanted.specifier}" if wanted.specifier else ""
        checks.append(Check(wanted.name, matches, version + expected, "" if matches else install))
    return checks


def _environment() -> Check:
    try:
        RapidConfig.from_env()
    except RapidOptionError as error:
        return Check("RAPID_SGL_*", False, str(error), "correct or unset the variable")
    count = sum(name.startswith("RAPID_SGL_") for name in os.environ)
    return Check("RAPID_SGL_*", True, f"{count} variables set, all valid")


def _entry_points() -> Iterator[Check]:
    allowed = os.environ.get("SGLANG_PLUGINS")
    for group, name in ENTRY_POINTS:
        label = f"entry point {name}"
        found = list(metadata.entry_points(group=group, name=name))
        if not found:
            yield Check(label, False, f"missing in group {group}", REINSTALL)
            continue
        try:
            found[0].load()
        except Exception as error:  # whatever importing the plugin raises is the finding
            yield Check(label, False, f"{found[0].value} does not load: {error!r}", REINSTALL)
            continue
        if allowed and name not in [text.strip() for text in allowed.split(",")]:
            yield Check(
                label, False, f"SGLANG_PLUGINS={allowed} leaves it out", f"add {name} to SGLANG_PLUGINS"
            )
            continue
        yield Check(label, True, f"{found[0].value} ({group})")


def _platform() -> Check:
    try:
        from sglang.srt.platforms import current_platform

        chosen = type(current_platform)  # a lazy object: resolved by the first attribute
        device = current_platform.get_device()
    except Exception as error:
        return Check(
            "platform", False, f"SGLang cannot select one: {error!r}", "check SGLANG_PLATFORM and drivers"
        )
    return Check("platform", True, f"{chosen.__name__} ({device})")


def _algorithm(update: Callable[[str], None]) -> Check:
    """RAPID in SGLang's registry after SGLang itself has loaded its plugins."""
    update("loading SGLang's plugins")
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    try:
        SpeculativeAlgorithm.from_string("RAPID")
    except ValueError as error:
        return Check("algorithm RAPID", False, f"not registered: {error}", REINSTALL)
    return Check("algorithm RAPID", True, "registered with --speculative-algorithm")


def _hooks() -> list[Check]:
    """Each symbol of SGLang that we hook: SGLang reports a failed hook only in its log."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    ours = [
        target
        for target, hooks in HookRegistry._hooks.items()
        if any(hook.__module__.startswith("rapid_sgl.") for _, hook, _ in hooks)
    ]
    failed = [target for target in ours if target not in HookRegistry._patched]
    if not failed:
        names = ", ".join(target.rsplit(".", 1)[1] for target in sorted(ours))
        return [Check("hooks", True, f"{len(ours)} applied: {names}")]
    version = metadata.version("sglang")
    fix = f"SGLang {version} differs from the release this plugin is made for; install the expected one"
    return [Check("hooks", False, f"{target} cannot be hooked", fix) for target in failed]


def _model() -> Check:
    from rapid_sgl import models

    checkpoint = models.embedded_checkpoint()
    if models.is_prepared(checkpoint):
        return Check("embedded model", True, str(checkpoint))
    try:
        gguf = models.embedded_gguf()
    except models.ModelError as error:
        # Not a fault: who serves a model of their own needs no embedded one.
        return Check("embedded model", True, f"not available ({error})")
    return Check("embedded model", True, f"not prepared yet; `rapid-sgl model` converts {gguf.name}")


def _machine() -> Check:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    return Check(
        "machine",
        True,
        f"{platform.machine()}, {os.cpu_count()} CPUs, torch uses {torch.get_num_threads()} threads, "
        f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB memory free",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """SGLang warns about every kernel package that this machine lacks; the report is what counts."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
