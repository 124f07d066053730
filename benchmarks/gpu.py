"""``python -m kvpass.benchmarks.gpu``: the GPU kernels on this machine's GPU, first checked, then measured.

Exit codes: 0 all checks passed, 1 a check failed (nothing is measured then), 4 there is no GPU the kernels run on.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

FAILED, NO_GPU = 1, 4
LENGTHS, BATCHES, DTYPES = (2048, 8192, 32768), (1, 8), ("bfloat16", "float16", "float32")
KV_HEADS, GROUP, DIM = 8, 4, 128  # a common 8B decoder
COPY_BYTES = 1 << 30
ROTATED_BYTES = 256 << 20  # several inputs in turn, together beyond any second-level cache
TRIES = 10
TOLERANCE = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}  # of outputs near 1, by their rounding
NEW_TOKENS = 64


def arguments(length, batch=1, kv_heads=KV_HEADS, group=GROUP, dim=DIM, dtype="bfloat16", tokens=1, slots=64,
              value_dim=None, skewed=False, softcap=0.0, sinks=False, window=0, seed=0, device="cuda"):  # fmt: skip
    """The arguments of ``kvpass::attend``: rows of ``length`` entries (0 to twice as many if ``skewed``) with votes,
    slack of NaN around them, and a tail half full whose other half is NaN."""
    import torch

    g = torch.Generator().manual_seed(seed)
    kind, value_dim, used, gap = getattr(torch, dtype), value_dim or dim, slots // 2, 3

    def draw(*shape):
        return torch.randn(*shape, generator=g).to(kind)

    lengths = torch.full((batch, kv_heads), length)
    if skewed:
        lengths = torch.randint(0, 2 * length + 1, (batch, kv_heads), generator=g)
    starts = (lengths + gap).flatten().cumsum(0) - lengths.flatten()
    total = int((lengths + gap).sum()) + gap
    live = torch.zeros(total, dtype=torch.bool)
    for start, count in zip(starts.tolist(), lengths.flatten().tolist(), strict=True):
        live[start : start + count] = True
    store_k, store_v, votes = draw(total, dim), draw(total, value_dim), torch.rand(total, generator=g) * 2
    tail_k, tail_v = draw(batch, kv_heads, slots, dim), draw(batch, kv_heads, slots, value_dim)
    for poisoned in (store_k, store_v, votes):
        poisoned[~live] = torch.nan
    for poisoned in (tail_k, tail_v):
        poisoned[:, :, used:] = torch.nan
    step = torch.arange(slots, dtype=torch.int32).expand(batch, -1)
    made = [
        draw(batch, tokens, kv_heads * group, dim).transpose(1, 2), draw(batch, kv_heads, tokens, dim),
        draw(batch, kv_heads, tokens, value_dim), (used + torch.arange(tokens)).int().repeat(batch, 1),
        store_k, store_v, votes, starts.view(batch, kv_heads), lengths.int(),
        tail_k, tail_v, step.where(step < used, -1).contiguous(), torch.tensor([used]),
        dim**-0.5, window, softcap, torch.randn(kv_heads * group, generator=g) if sinks else None, 0, True,
    ]  # fmt: skip
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in made]


# What is checked: rows, groups, dimensions, tokens, options.
CHECKS = {
    "plain": {},
    "skewed rows": {"length": 500, "skewed": True, "batch": 3},
    "empty rows": {"length": 0},
    "one entry": {"length": 1},
    "groups of 1": {"group": 1},
    "groups of 16": {"group": 16, "kv_heads": 2},
    "dims 80 and 96": {"dim": 80, "value_dim": 96},
    "dim 256": {"dim": 256, "kv_heads": 2},
    "several tokens": {"tokens": 7},
    "a window": {"window": 9, "length": 0},
    "soft cap and sinks": {"softcap": 20.0, "sinks": True},
    "a long row": {"length": 20000, "kv_heads": 1},
}


def check_kernels(run: Callable, device: str, **smaller) -> dict[str, float]:
    """Differences of ``run`` from the reference on the same numbers, each over its tolerance: above 1 is wrong."""
    from kvpass.kernels import reference

    worst = {}
    for dtype in DTYPES:
        for name, options in CHECKS.items():
            made = arguments(**({"length": 300, "dtype": dtype, "device": device} | options | smaller))
            host = [value.cpu() if hasattr(value, "cpu") else value for value in made]
            pairs = [(run(*made), reference.attend(*host)), (made[9], host[9]), (made[10], host[10])]
            worst[f"{dtype}: {name}"] = _far(*pairs[0]) / TOLERANCE[dtype] + sum(_far(*pair) for pair in pairs[1:])
    return worst


def _far(ours, theirs) -> float:
    """Largest difference; NaN must stand where NaN stands."""
    if bool((ours.cpu().isnan() != theirs.isnan()).any()):
        return float("inf")
    return (ours.cpu().double() - theirs.double()).abs().nan_to_num(0.0).max().item()


def check_repeats(run: Callable, device: str) -> dict[str, float]:
    """The same call twice gives the same bits."""
    first, second = (run(*arguments(3000, skewed=True, device=device)) for _ in range(2))
    return {"repeated calls": _far(first, second.cpu()) * 1e9}


def check_mass(mass: Callable, device: str, slots: int = 3000) -> dict[str, float]:
    """Attention sums of the GPU against those of the CPU."""
    import torch

    from kvpass.kernels.entries import Entries, Observation
    from kvpass.kernels.score import attention_mass

    worst = {}
    for dtype in DTYPES:
        g = torch.Generator().manual_seed(0)
        k = torch.randn(2, 2, slots, 64, generator=g).to(getattr(torch, dtype))
        q = torch.randn(2, 6, 70, 64, generator=g).to(k.dtype)
        tokens = torch.randint(0, 3, k.shape[:3], generator=g).int()
        pos = torch.arange(slots).int().expand(k.shape[:3]).masked_fill(tokens == 0, -1)
        q_pos = torch.arange(slots - 70, slots).int().repeat(2, 1)
        entries, seen = Entries(k, k, tokens.float().log(), tokens, pos), Observation(q, q_pos, 0.125)
        given = [tensor.to(device) for tensor in (k, entries.log_votes, pos, q, q_pos)]
        ours = mass(*given, 0.125, True)
        worst[f"{dtype}: attention mass"] = _far(ours, attention_mass(entries, seen, per_head=True)) / 1e-3
    return worst


def check_graph(run: Callable) -> dict[str, float]:
    """A captured call, replayed on rows of other lengths and contents, equals the eager call."""
    import torch

    held = arguments(4000, batch=2)
    run(*held)  # compiles before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*held)
    worst = {}
    for seed, length in enumerate((4000, 1500, 0)):
        fresh = arguments(length, batch=2, seed=seed + 1)
        for index, (into, value) in enumerate(zip(held, fresh, strict=True)):
            if isinstance(into, torch.Tensor):
                (into[: len(value)] if index in (4, 5, 6) else into).copy_(value)
        eager = [value.clone() if isinstance(value, torch.Tensor) else value for value in held]
        expected = run(*eager)
        graph.replay()
        torch.cuda.synchronize()
        far = max(_far(out, expected.cpu()), _far(held[9], eager[9].cpu()), _far(held[10], eager[10].cpu()))
        worst[f"graph replayed at {length}"] = far * 1e9
    return worst


def seconds(calls: Sequence[Callable]) -> float:
    """Median seconds of one call, the calls in turn inside one CUDA graph."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(TRIES + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return median(times[2:])


def copy_ceiling() -> float:
    """GB/s, read and written, of copying memory."""
    import torch

    source = torch.ones(COPY_BYTES // 4, device="cuda")
    into = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds([lambda: into.copy_(source)]) / 1e9


def decode_rows(run: Callable) -> list[dict]:
    """GB/s of decode attention, and SDPA over as many plain keys."""
    import torch
    import torch.nn.functional as F

    rows = []
    for dtype in DTYPES:
        for batch in BATCHES:
            for length in LENGTHS:
                size = getattr(torch, dtype).itemsize
                read = batch * KV_HEADS * length * (2 * DIM * size + 4)
                sets = [arguments(length, batch, dtype=dtype, seed=seed) for seed in range(1 + ROTATED_BYTES // read)]
                ours = seconds([lambda given=given: run(*given) for given in sets])
                dense = [
                    (q, *(torch.randn(batch, KV_HEADS, length, DIM, device="cuda", dtype=q.dtype) for _ in "kv"))
                    for q, *_ in sets
                ]
                stock = seconds(
                    [lambda qkv=qkv: F.scaled_dot_product_attention(*qkv, enable_gqa=True) for qkv in dense]
                )
                row = {"dtype": dtype, "batch": batch, "length": length, "us": ours * 1e6, "sdpa_us": stock * 1e6}
                rows.append(row | {"gb_per_s": read / ours / 1e9})
    return rows


def decode_model() -> dict:
    """Milliseconds per token of the packaged model or, where it is not installed, a tiny one; bf16, on the GPU."""
    import time

    import torch

    import kvpass
    from kvpass import models

    try:
        model, name = models.load("smollm2")[0], "smollm2"
    except (FileNotFoundError, ImportError):
        model, name = models.load("tiny-llama")[0], "tiny-llama"
    model = model.to("cuda", torch.bfloat16)
    vocabulary = model.config.vocab_size
    ids = torch.randint(0, vocabulary, (1, 1024 if name == "smollm2" else 64), device="cuda")
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    result = {"model": name}
    for label, variant in (("untouched", model), ("budget 1", kvpass.compile(model, 1.0)),
                           ("budget 0.1", kvpass.compile(model, 0.1))):  # fmt: skip
        variant.generate(ids, **options)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        variant.generate(ids, **options)
        torch.cuda.synchronize()
        result[f"{label}, ms/token with its share of the prompt"] = (time.perf_counter() - begun) / NEW_TOKENS * 1e3
    return result


def _guarded(part: Callable, *given):
    """Its result, or the reason why there is none: the other parts go on."""
    try:
        return part(*given)
    except Exception:
        return {"failed": traceback.format_exc(limit=3)}


def why_no_gpu() -> str | None:
    """Why there is nothing to measure here; None on a machine with a GPU."""
    import torch

    from kvpass.kernels import triton

    return triton.why_not(torch.device("cuda")) if torch.cuda.is_available() else "torch sees no CUDA device"


def main(argv: Sequence[str] | None = None) -> int:
    """Checks, measures, prints; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvpass.benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE too")
    options = parser.parse_args(argv)
    if (reason := why_no_gpu()) is not None:
        print(f"no GPU to check or measure the kernels on: {reason}")
        return NO_GPU
    import torch

    from kvpass.kernels import triton
    from kvpass.kernels.attend import attend

    results: dict = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "checks": {}}
    parts = (
        (check_kernels, attend, "cuda"),
        (check_repeats, attend, "cuda"),
        (check_mass, triton.attention_mass, "cuda"),
    )
    for part, *given in (*parts, (check_graph, attend)):
        found = _guarded(part, *given)
        results["checks"] |= {part.__name__: found["failed"]} if "failed" in found else found
    wrong = {name: far for name, far in results["checks"].items() if isinstance(far, str) or not far <= 1}
    print(f"{results['gpu']}: {len(results['checks']) - len(wrong)} of {len(results['checks'])} checks passed")
    for name, far in wrong.items():
        print(f"wrong: {name}: {far}")
    if not wrong:
        results["copy_gb_per_s"] = copy_ceiling()
        results["decode"] = _guarded(decode_rows, attend)
        results["model"] = _guarded(decode_model)
        print(f"copy: {results['copy_gb_per_s']:.0f} GB/s")
        for row in results["decode"] if isinstance(results["decode"], list) else [results["decode"]]:
            print(row)
        print(results["model"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return FAILED if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
