"""The Triton kernels without a GPU: interpreted against the reference, and compiled ahead of time."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvpass.kernels import triton as kernels

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
EXACT = 3e-6  # fp32 softmax in another order
TOLERANCES = {  # what each case of interpreted.py must stay within
    "rows of any length": EXACT,
    "several tokens and padding": EXACT,
    "windows and rings": EXACT,
    "chunks": EXACT,
    "no tail": EXACT,
    "group sizes": EXACT,
    "head dims": 1e-5,  # logits of 96 terms
    "softcap and sinks": EXACT,
    "half precision": 4e-3,  # softmax weights are rounded to the values' type before their product
    "bfloat16": 2e-2,  # the output's rounding
    "an fp16 cache of an fp32 model": EXACT,
    "integer votes repeat entries": EXACT,
    "order of entries": EXACT,
    "how keys are split": EXACT,
    "repeated runs differ by": 0,
    "slack is never read": 0,
    "dead rows see the tail alone": 0,
    "nothing seen gives zeros": 0,
    "rows that share entries": EXACT,
    "attention mass": 1e-5,  # a sum over 18 queries
}


@pytest.fixture(scope="module")
def interpreted():
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "tests.kernels.interpreted"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", TOLERANCES)
def test_interpreted_kernels_match_the_reference(interpreted, case):
    """The kernels, run by Triton's interpreter, equal the reference and respect the cache's rules."""
    assert interpreted[case] <= TOLERANCES[case]


@pytest.mark.slow
def test_every_interpreted_case_is_judged(interpreted):
    """No case runs unjudged."""
    assert interpreted.keys() == TOLERANCES.keys()


def test_a_machine_without_a_gpu_never_loads_triton():
    """The operator works where Triton and a GPU are missing, and the reason is known."""
    code = (
        "import sys, torch; import kvpass.kernels.attend, kvpass.kernels.score; from kvpass.kernels import triton;"
        "print(triton.why_not(torch.device('cpu')), 'kvpass.kernels.triton.launch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "cpu is not a CUDA device False"
    assert not kernels.available(torch.device("cpu"))


def compiled(kernel, capability, kind, constants, stages):
    """The kernel for a GPU that need not be here: its machine code, its resources."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"ROW_START": "i64", "TAIL_AT": "i64"}
    pointers |= dict.fromkeys(("Q_POS", "POS", "ROW_LEN", "TAIL_POS"), "i32")
    pointers |= dict.fromkeys(("LOG_VOTES", "VOTES", "PART_ML", "PART_O", "SINKS", "LSE"), "fp32")
    if "LSE" in kernel.arg_names:
        pointers["OUT"] = "fp32"
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = "fp32" if name in ("qk_scale", "softcap") else "i32"
        if name.isupper():
            signature[name] = "*" + pointers.get(name, kind)
        if name.isupper() or re.fullmatch(r"(q|k|v|tk|tv)_[bhswn]|chunk", name):
            aligned[index,] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 8 if "PRECISION" in constants else 4, "num_stages": stages},
    )


def dumped(binary, option, folder):
    """What the ``cuobjdump`` of Triton's wheel says."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton comes without cuobjdump")
    file = folder / "kernel.cubin"
    file.write_bytes(binary)
    return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["store_softmax", "tail_softmax", "merge_and_append", "probe_lse", "column_sums"])
def test_compiled_kernels_are_lean(name, kind, capability, tmp_path, monkeypatch):
    """For a GPU, kernels keep to 128 registers without spilling, load 128 bits at a time and use matrix instructions
    for 16-bit types."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter does not compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    from kvpass.kernels.triton import decode, launch, probe

    kernel = getattr(decode, name, None) or getattr(probe, name)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    number, precision = launch.numerics(dtype)
    plan = launch.config(1 << 16, 1, precision == "ieee", 128, 132)
    constants = {
        "GROUP": 4, "KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_K": 128, "BLOCK_V": 128, "SOFTCAP": False, "BLOCK_R": 64,
        "BLOCK_M": launch.MAX_QUERIES, "BLOCK_N": plan.block, "BLOCK_T": launch.PARTIALS, "HAS_SINKS": True,
        "WRITES": True, "TYPE": number, "PRECISION": precision,
        "DIM": 128, "BLOCK_D": 128, "BLOCK_W": launch.probes(precision), "CAUSAL": True,
    }  # fmt: skip
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    built = compiled(kernel, capability, kind, constants, plan.stages)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", dumped(built.asm["cubin"], "-res-usage", tmp_path))
    registers, stack = map(int, usage.groups())
    code = dumped(built.asm["cubin"], "-sass", tmp_path)
    assert registers <= 128 and stack == 0
    assert not re.search(r"\b(LDL|STL)\b", code)
    assert re.search(r"\bLDG\S*\.128|\bLDGSTS\S*\.128", code)
    if kind == "bf16" and "PRECISION" in constants:
        assert re.search(r"\bHG?MMA\b", code)


@pytest.mark.slow
def test_offsets_have_64_bits(tmp_path, monkeypatch):
    """The start of a row is never multiplied in 32 bits: caches beyond 2^31 elements are addressed right."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from kvpass.kernels.triton import decode, launch

    number, precision = launch.numerics(torch.bfloat16)
    constants = {
        "GROUP": 4, "KEY_DIM": 64, "VALUE_DIM": 64, "BLOCK_K": 64, "BLOCK_V": 64, "SOFTCAP": False, "BLOCK_R": 16,
        "BLOCK_M": 16, "BLOCK_N": 16, "TYPE": number, "PRECISION": precision,
    }  # fmt: skip
    text = compiled(decode.store_softmax, 80, "bf16", constants, 2).asm["ttir"]
    loads = re.findall(r"tt\.addptr %STORE_[KV]\S*, (\S+) : !tt\.ptr<bf16>, (\S+)", text)
    assert loads and all(width == "i64" for _, width in loads)
