"""Where a node comes from: module path and source line, for reports and refusals."""

from __future__ import annotations

import re

from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def layer(node: Node) -> str:
    """Innermost module path of a node, as ``model.named_modules()`` prints it."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return paths[-1].removeprefix("model.") if paths and paths[-1] else "model"


def source(node: Node) -> str:
    """``file.py:line`` of the model's code that made the node, torch's own frames left out."""
    frames = [frame for frame in _FRAME.findall(node.meta.get("stack_trace") or "") if "/torch/" not in frame[0]]
    if not frames:
        return ""
    path, line = frames[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}"
