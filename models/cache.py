"""A directory of derived files, built once, whole or absent, and checked on every use."""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

_FORMAT = 1
_MANIFEST = "manifest.json"


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/kvpass/models`, by default `~/.cache/kvpass/models`."""
    # The XDG specification says to ignore an empty or relative value.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "kvpass" / "models"


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verified(directory: Path, source: str, build: Callable[[Path], None]) -> Path:
    """Return `directory`, having checked that it holds exactly what `build` wrote from `source`.

    source identifies the input (its hash); a directory made from another source is rebuilt, and so is one
    with a missing, truncated or altered file, after one line on stderr that says why. `build` fills an empty
    directory on the same file system. Safe against other processes and against being killed half way.

    Raises OSError when the cache cannot be written, and whatever `build` raises.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_name(directory.name + ".lock")):
        if (fault := _fault(directory, source)) is None:
            return directory
        if directory.exists():
            print(f"kvpass: rebuilding {directory}: {fault}", file=sys.stderr)
        _build(directory, source, build)
    return directory


def _fault(directory: Path, source: str) -> str | None:
    try:
        manifest = json.loads((directory / _MANIFEST).read_text())
        if (manifest["format"], manifest["source"]) != (_FORMAT, source):
            return "made from another source"
        for name, digest in manifest["files"].items():
            if sha256(directory / name) != digest:
                return f"{name} does not match its recorded hash"
    except FileNotFoundError as missing:
        return f"{Path(missing.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MANIFEST} is not readable"
    return None


def _build(directory: Path, source: str, build: Callable[[Path], None]) -> None:
    prefix = f".{directory.name}.new-"
    # The lock is held, so any earlier attempt still lying here was killed.
    for abandoned in directory.parent.glob(prefix + "*"):
        shutil.rmtree(abandoned)
    fresh = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    try:
        build(fresh)
        files = {path.name: sha256(path) for path in sorted(fresh.iterdir())}
        manifest = {"format": _FORMAT, "source": source, "files": files}
        (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if directory.exists():
            shutil.rmtree(directory)
        fresh.rename(directory)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
