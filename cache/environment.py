"""Key parts that describe the machine, readable and the same on every machine where they mean the same."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
from pathlib import Path

_IRRELEVANT = re.compile(
    r"--(xla_dump_\w+|xla_force_host_platform_device_count|xla_gpu_cuda_data_dir|xla_tpu_sdc_checker_streamz_metric"
    r"|xla_tpu_sdc_checker_enable_(sdc_event|coresweep_ng)_callbacks|xla_tpu_sdc_checker_no_logging_if_callback_is_present"
    r"|v|vmodule|logtostderr|alsologtostderr|stderrthreshold|minloglevel|log_dir)"
)
"""Flags that decide what is written about a program, not the program (JAX's list), or that other parts say."""
_CODE_FEATURES = re.compile(
    r"sse\w*|ssse3|pni|avx\w*|amx\w*|fma\w*|f16c|xop|bmi\d|adx|aes|vaes|v?pclmulqdq|sha\w*|gfni|popcnt|abm|lzcnt|movbe"
    r"|cx16|rdrand|rdseed|xsave\w*|lahf_lm|fsgsbase|clwb|clflushopt|mmx\w*|tbm|prfchw|3dnowprefetch|serialize|movdir\w*"
)
"""x86 features that code generation looks at. Others (mitigations, virtualisation) come and go with the kernel."""
_BLOCKS, _BLOCK_SIZE = 64, 4096


def keyed_flags(text: str) -> str:
    """XLA_FLAGS or LIBTPU_INIT_ARGS as a key part: sorted, the last of a repeated flag, without dump and debug flags.

    XLA takes a file name in place of flags; the file's contents are then what counts.
    """
    if text.strip() and not text.lstrip().startswith("-") and Path(text.strip()).is_file():
        text = Path(text.strip()).read_text()
    flags = dict(word.partition("=")[::2] for word in shlex.split(text))
    kept = {name: value for name, value in flags.items() if not _IRRELEVANT.fullmatch(name)}
    return " ".join(f"{name}={value}" if value not in ("", "true") else name for name, value in sorted(kept.items()))


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The host's architecture and the instruction sets that decide what CPU code may contain, sorted.

    Where the system does not list them (anything but Linux) the processor's name stands for them.
    """
    try:
        listed = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        listed = None
    machine = platform.machine()
    if listed is None:
        return f"{machine} {platform.processor()}".strip()
    words = listed[1].split()
    kept = words if machine not in ("x86_64", "AMD64", "i686") else filter(_CODE_FEATURES.fullmatch, words)
    return " ".join([machine, *sorted(kept)])


def package_version(name: str) -> str:
    """The installed version of a distribution, or ``absent``. The distribution is not imported."""
    from importlib.metadata import PackageNotFoundError, version  # 17 ms

    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def file_fingerprint(path: Path) -> str:
    """Size and a hash over 64 evenly spaced blocks: tells builds of a shared library apart that claim one version.

    A library of 600 MB takes about a millisecond; reading all of it would take a second. The first block holds an ELF
    file's build id.

    Raises:
        OSError: it cannot be read.
    """
    total = hashlib.sha256()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for block in range(_BLOCKS):
            file.seek(max(0, size - _BLOCK_SIZE) * block // (_BLOCKS - 1))
            total.update(file.read(_BLOCK_SIZE))
    return f"{size}-{total.hexdigest()[:16]}"
