"""Compiles the C++ kernels at first use and loads them; says why when it cannot."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch  # noqa: F401  its OpenMP runtime must be in the process before these kernels load

HERE = Path(__file__).parent
# Contraction is named because -std=c++17 turns it off; nothing here relaxes infinities or NaN.
FLAGS = ["-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-w"]
NATIVE = "-march=native"


class BuildError(RuntimeError):
    """The kernels cannot be built or loaded here."""


def library() -> ctypes.CDLL | None:
    """The loaded kernels, built if need be; None when they cannot be had (``why_not`` says why)."""
    return _load()[0]


def available() -> bool:
    """Whether the kernels can be called. The first call may compile them."""
    return _load()[0] is not None


def why_not() -> str | None:
    """The reason the kernels are unavailable; None when they are available."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if os.environ.get("KVPASS_NO_CPP", "0") not in ("", "0"):
        return None, "KVPASS_NO_CPP is set"
    try:
        return ctypes.CDLL(str(_built())), None
    except (BuildError, OSError) as error:
        return None, str(error)


def _built() -> Path:
    """Path of the shared library for these sources, this compiler and this processor."""
    compiler = _compiler()
    version = _run([*compiler, "--version"]).stdout
    errors = []
    for flags in ([*FLAGS, NATIVE], FLAGS):
        path = _cache_dir() / f"{_key(flags, version)}.so"
        if path.exists():
            return path
        with _lock(path):
            if path.exists():  # another process built it while this one waited
                return path
            try:
                _compile(compiler, flags, path)
                return path
            except BuildError as error:
                errors.append(str(error))
    raise BuildError(errors[0])


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    for command in [named] if named else ["g++", "c++", "clang++"]:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise BuildError(f"no C++ compiler: {named or 'g++, c++ and clang++'} not found")


def _key(flags: list[str], version: str) -> str:
    digest = hashlib.sha256()
    for part in [*flags, version, platform.machine(), _processor()]:
        digest.update(part.encode() + b"\0")
    for source in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _processor() -> str:
    """What -march=native depends on, so that a cache shared between machines never serves the wrong code."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    return platform.processor()


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvpass" / "kernels"


@contextlib.contextmanager
def _lock(path: Path):
    """Holds the build of ``path`` against other processes."""
    try:
        import fcntl
    except ImportError as error:
        raise BuildError(f"no file locks on this system: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: list[str], flags: list[str], path: Path) -> None:
    """Compiles the sources side by side and moves the linked library to ``path`` in one step."""
    print(
        f"kvpass: compiling the CPU kernels with {compiler[0]} (once, a few seconds)",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        objects, jobs = [], []
        for source in sorted(HERE.glob("*.cpp")):
            objects.append(str(Path(directory) / f"{source.stem}.o"))
            command = [*compiler, *flags, "-c", str(source), "-o", objects[-1]]
            jobs.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        messages = [job.communicate()[1] for job in jobs]
        for job, message in zip(jobs, messages, strict=True):
            if job.returncode:
                raise BuildError(f"{compiler[0]} failed: {message.strip()[-2000:]}")
        linked = Path(directory) / "kernels.so"
        _run([*compiler, *flags, "-shared", *objects, "-o", str(linked)])
        ctypes.CDLL(str(linked))  # a library that does not load must not enter the cache
        linked.replace(path)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if result.returncode:
        raise BuildError(f"{command[0]} failed: {result.stderr.strip()[-2000:]}")
    return result
