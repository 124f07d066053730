"""What memory allows: bytes that a decode step must read, over the read bandwidth of this process."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from torch import nn

from kvpass.benchmarks.variants import cache_read_bytes

STREAM_BYTES = 1 << 30  # beyond any cache
STREAM_TRIES = 5


def ceiling() -> float | None:
    """GB/s of reading memory with torch's threads, best of a few; None without the C++ kernels."""
    import torch

    from kvpass.kernels import cpu

    if not cpu.available():
        return None
    data = torch.ones(STREAM_BYTES // 4)
    best = float("inf")
    for _ in range(STREAM_TRIES):
        started = time.perf_counter()
        cpu.read_stream(data)
        best = min(best, time.perf_counter() - started)
    return STREAM_BYTES / best / 1e9


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that every step reads; of an input embedding that is not also the head it reads one row."""
    held = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None and head is not None and embedding.weight.data_ptr() != head.weight.data_ptr():
        held.pop(embedding.weight.data_ptr(), None)
    return sum(held.values())


def fill(row: dict, weights: int, cache, gb_per_s: float | None) -> None:
    """Add to a row what a step must read, and the share of its own roofline that it reached."""
    row["weight_mib"], row["kv_read_mib"] = weights / 2**20, cache_read_bytes(cache) / 2**20
    row["roofline_ms"] = row["of_roofline"] = None
    if gb_per_s is not None:
        row["roofline_ms"], row["of_roofline"] = share(
            weights + cache_read_bytes(cache), gb_per_s, row["decode_ms_per_token"]["median"]
        )


def share(read: int, gb_per_s: float, ms: float) -> tuple[float, float]:
    """Milliseconds that reading ``read`` bytes takes at ``gb_per_s``, and their share of ``ms``."""
    least = read / gb_per_s / 1e6
    return least, least / ms


def break_even(compress_s: float, full_ms: float, own_ms: float) -> float | None:
    """Tokens after which faster steps have paid for the compression; None when steps are not faster."""
    return 1e3 * compress_s / (full_ms - own_ms) if own_ms < full_ms else None


class Peak:
    """``with Peak() as peak``: then ``peak.mib`` is how far resident memory rose meanwhile, where Linux tells."""

    def __enter__(self) -> Peak:
        self.mib: float | None = None
        self._before: float | None = None
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark
            self._before = _status("VmRSS")
        return self

    def __exit__(self, *_) -> None:
        if self._before is not None:
            self.mib = _status("VmHWM") - self._before


def _status(field: str) -> float:
    """MiB of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1]) / 1024
