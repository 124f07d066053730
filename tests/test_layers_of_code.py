"""The repository's own rules: who imports whom, what happens at import, what may decide in a pass."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {  # folder -> what its files never import
    "passes": (
        "kvpass.policies",
        "kvpass.cache",
        "kvpass.binding",
        "kvpass.runtime",
        "kvpass.models",
        "transformers",
    ),
    "kernels": ("kvpass.passes", "kvpass.policies", "kvpass.models", "kvpass.cache", "transformers"),
    "models": ("kvpass.passes", "kvpass.kernels", "kvpass.policies", "kvpass.cache"),
}
FAMILIES = (
    r"\b(llama|mistral|mixtral|qwen\d?|gemma\d?|gpt2|gpt_neo\w*|gptj|bloom|falcon|mpt|phi\d?|opt"
    r"|deepseek\w*|smollm\d?)\b"
)
FIELDS = ("model_type", "layer_types", "sliding_window", "architectures")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_run_one_way(folder):
    """No folder imports what is above it."""
    for path in (ROOT / folder).rglob("*.py"):
        for name in imports(path):
            assert not name.startswith(FORBIDDEN[folder]), f"{path} imports {name}"


def test_no_model_decides_in_a_pass():
    """No model family, class or configuration field is named in the code of a pass."""
    for path in (ROOT / "passes").glob("*.py"):
        tree = ast.parse(path.read_text())
        words = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        words += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        words += [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        for word in words:
            assert not re.search(FAMILIES, word, re.IGNORECASE), f"{path}: {word}"
            assert word not in ("model_type", "layer_types", "sliding_window", "architectures"), f"{path}: {word}"


def test_import_does_no_work():
    """`import kvpass` is quick and loads neither torch nor transformers."""
    code = "import sys, kvpass; print('torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
