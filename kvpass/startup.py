"""The validated step program on disk, so that the second start of a model does not trace it.

An entry is JSON under a key of everything that could change it: the model's code, configuration, the settings and
functions its modules hold, weights' names, shapes and sampled values, the versions of torch and transformers, and
kvpass itself. A hit is validated against the model like a fresh trace.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
import transformers
from torch import Tensor, nn

from kvpass.identity import settings
from kvpass.passes.serial import NotSerializable, from_data, to_data
from kvpass.passes.spec import CONSTANT, Program
from kvpass.report import Report, Row
from kvpass.saved import digest_tensors

OFF = "KVPASS_NO_CACHE"  # environment: any value turns the disk cache off


def folder() -> Path:
    """Where entries live: ``$XDG_CACHE_HOME/kvpass/programs``."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvpass" / "programs"


def key(model: nn.Module) -> str:
    """Hash of everything that the traced program of ``model`` depends on."""
    digest = hashlib.sha256(_own_source().encode())
    for part in (sys.version, torch.__version__, transformers.__version__, str(model), _config(model)):
        digest.update(part.encode())
    for source in sorted({inspect.getsourcefile(type(module)) or "" for module in model.modules()}):
        digest.update(Path(source).read_bytes() if source else b"")
    for line in settings(model):
        digest.update(line.encode())
    digest.update(digest_tensors([*model.named_parameters(), *model.named_buffers()]).encode())
    return digest.hexdigest()


def entry(model: nn.Module) -> Path | None:
    """Where the program of ``model`` is or would be stored; None when it is traced every time."""
    if os.environ.get(OFF) or os.environ.get("KVPASS_DUMP"):
        return None
    try:
        return folder() / f"{key(model)}.json"
    except (OSError, TypeError):
        return None  # code without a file, as in a notebook, or an attribute that no key describes


def load(path: Path | None, model: nn.Module) -> tuple[Program, Report] | None:
    """The program stored at ``path`` over ``model``'s own weights, or None."""
    if path is None or not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
        program = from_data(data["program"], lambda name: _tensor(model, name))
        return program, Report(tuple(Row(**row) for row in data["report"]))
    except (OSError, ValueError, KeyError, TypeError, NotSerializable):
        path.unlink(missing_ok=True)  # damaged: traced again and rewritten
        return None


def store(path: Path | None, model: nn.Module, program: Program, report: Report) -> None:
    """Write an entry, whole or not at all. A program that has no data form is simply traced every time."""
    if path is None:
        return
    try:
        for node in program.module.graph.nodes:
            if node.op == "get_attr" and not str(node.target).startswith(CONSTANT):
                _tensor(model, str(node.target))
        text = json.dumps({"program": to_data(program), "report": report.to_dict()["layers"]})
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        Path(temporary).replace(path)
    except (NotSerializable, OSError):
        return


def _tensor(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer that the traced wrapper calls ``model.<name>``."""
    found: object = model
    for part in name.removeprefix("model.").split("."):
        found = getattr(found, part, None)
    if not isinstance(found, Tensor):
        raise NotSerializable(f"{name} is a constant of the trace, not a weight")
    return found


def _config(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    settings = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else ""
    return settings + str(getattr(config, "_attn_implementation", ""))


@cache
def _own_source() -> str:
    import kvpass
    from kvpass import kernels, passes

    return sources(kvpass, passes, kernels)


def sources(*packages: ModuleType) -> str:
    """Hash of the Python files of ``packages``."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(Path(package.__file__).parent.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
