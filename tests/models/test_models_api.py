import subprocess
import sys

import pytest

from kvpass.models import load, names, tiny_names


def test_import_is_light():
    """Importing kvpass.models and listing names loads neither torch nor transformers nor the compiler."""
    heavy = ("torch", "transformers", "kvpass.passes", "kvpass.kernels")
    code = f"import sys, kvpass.models as m; m.names(); print([x for x in {heavy} if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_models_never_import_the_compiler():
    """Building every kind of model imports neither kvpass.passes nor kvpass.kernels."""
    code = (
        "import sys, kvpass.models as m, kvpass.models.counterexamples, kvpass.models.smollm2;"
        "m.tiny('llama');"
        "print([x for x in sys.modules if x.startswith(('kvpass.passes', 'kvpass.kernels'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_load():
    """The real model comes first; tiny-<row> loads that row, without a tokenizer."""
    assert names()[0] == "smollm2"
    assert names()[1:] == tuple(f"tiny-{name}" for name in tiny_names())
    model, tokenizer = load("tiny-llama", attn="eager")
    assert model.config.model_type == "llama"
    assert model.config._attn_implementation == "eager"
    assert tokenizer is None


@pytest.mark.parametrize("name", ["gpt5", "llama", "tiny-", "tiny-smollm2", ""])
def test_unknown_name(name):
    """An unknown name is a ValueError that lists the known ones."""
    with pytest.raises(ValueError, match=r"unknown model .*smollm2, tiny-llama"):
        load(name)


def test_tiny_is_a_function_after_importing_its_module():
    """`kvpass.models.tiny` stays the function, whatever has been imported."""
    import kvpass.models
    from kvpass.models.zoo import ZOO

    assert callable(kvpass.models.tiny)
    assert tuple(ZOO) == tiny_names()
