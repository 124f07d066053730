"""What was done to a model and what a cache holds: printable, and data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tabulate import tabulate

from kvpass.passes.spec import Mask, Plan


@dataclass(frozen=True)
class Row:
    """One attention layer, or one softmax that is not attention."""

    layer: str
    status: str  # found | refused | ignored
    attention: str = ""
    mask: str = ""
    note: str = ""


@dataclass(frozen=True)
class Report:
    """The analysis of a model, one row a layer."""

    rows: tuple[Row, ...]

    @staticmethod
    def of(plan: Plan) -> Report:
        """The rows of a plan; a layer with a refusal is shown once, as refused."""
        refused = {refusal.layer for refusal in plan.refusals}
        owners: dict[tuple, str] = {}
        rows = []
        for site in plan.sites:
            owner = owners.setdefault((site.k, site.v), site.layer)
            note = f"reads the cache of {owner}" if owner != site.layer else site.frame_note
            if site.layer not in refused:
                rows.append(Row(site.layer, "found", str(site), str(site.mask), note))
        rows += [
            Row(
                refusal.layer,
                "refused",
                note=refusal.reason
                + _place(refusal.node, refusal.source)
                + (f"; {refusal.hint}" if refusal.hint else ""),
            )
            for refusal in plan.refusals
        ]
        rows += [Row(item.layer, "ignored", note=item.reason) for item in plan.ignored]
        return Report(tuple(rows))

    @property
    def supported(self) -> bool:
        return not any(row.status == "refused" for row in self.rows)

    def to_dict(self) -> dict:
        return {"supported": self.supported, "layers": [asdict(row) for row in self.rows]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        table = [[row.layer, row.status, row.attention, row.mask, row.note] for row in self.rows]
        verdict = "every attention layer can be rewritten" if self.supported else "this model cannot be compiled"
        return tabulate(table, ["layer", "status", "attention", "mask", "note"]) + f"\n{verdict}"


def _place(node: str, source: str) -> str:
    return (f" at node {node}" if node else "") + (f" ({source})" if source else "")


@dataclass(frozen=True)
class LayerUse:
    """What one layer of a cache holds."""

    layer: str
    mask: str
    entries: int  # over sequences and KV heads
    shortest_row: int
    longest_row: int
    represented: int  # tokens the entries stand for
    most_votes: int  # tokens the largest entry stands for
    mib: float


@dataclass(frozen=True)
class CacheReport:
    """A cache: entries, physical bytes, votes and times."""

    layers: tuple[LayerUse, ...]
    tokens_seen: int
    batch: int
    entries: int
    full_entries: int  # what the untouched model would hold
    mib: float  # bytes of the storages, metadata and slack included
    full_mib: float
    seconds: dict
    attend: str  # which implementation serves decode
    refresh: dict | None = None  # what the full keys and values outside the cache cost, where rows are refreshed

    @staticmethod
    def of(cache, plan: Report) -> CacheReport:
        """Measure ``cache``."""
        from kvpass.kernels import cpu

        uses, full_entries, full_bytes = [], 0, 0
        total = int(cache.seen.sum())
        width = next(cache.owner.step.module.parameters()).element_size()
        for index, (layer, lengths) in enumerate(zip(cache.specs, cache.lengths(), strict=True)):
            store, tail = cache.stores[index], cache.tails[layer.window]
            exact = int((tail.pos >= 0).sum()) * layer.kv_heads
            key, value = cache.keys[index], cache.values[index]
            tensors = [*store.tensors().values(), key, value]
            uses.append(
                LayerUse(
                    layer=layer.layer,
                    mask=str(Mask(layer.window, layer.chunk)),
                    entries=int(lengths.sum()),
                    shortest_row=int(lengths.min()),
                    longest_row=int(lengths.max()),
                    represented=int(store.tokens.sum()) + exact,
                    most_votes=int(store.tokens.max()) if store.tokens.numel() else 1,
                    mib=sum(tensor.untyped_storage().nbytes() for tensor in tensors) / 2**20,
                )
            )
            seen = cache.seen.clamp(max=layer.window) if layer.window else cache.seen
            full_entries += int(seen.sum()) * layer.kv_heads
            full_bytes += int(seen.sum()) * layer.kv_heads * (layer.key_dim + layer.value_dim) * width
        return CacheReport(
            layers=tuple(uses),
            tokens_seen=total,
            batch=cache.batch_size,
            entries=cache.entries(),
            full_entries=full_entries,
            mib=cache.nbytes() / 2**20,
            full_mib=full_bytes / 2**20,
            seconds=asdict(cache.times),
            attend=f"packed SDPA ({cpu.why_not()})" if cpu.why_not() else "C++",
            refresh=None if cache.full is None else _outside(cache),
        )

    def to_dict(self) -> dict:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        table = [
            [
                use.layer,
                use.mask,
                use.entries,
                use.shortest_row,
                use.longest_row,
                use.represented,
                use.most_votes,
                use.mib,
            ]
            for use in self.layers
        ]
        head = [
            "layer",
            "mask",
            "entries",
            "shortest row",
            "longest row",
            "tokens stood for",
            "most votes",
            "MiB",
        ]
        times = self.seconds
        per_token = f", {1e3 * times['decode'] / times['decoded']:.1f} ms/token" if times["decoded"] else ""
        maintain = f", compress while decoding {times['maintain']:.2f} s" if times["maintain"] else ""
        lines = [] if self.refresh is None else ["", tabulate([list(self.refresh.values())], REFRESH, floatfmt=".2f")]
        return "\n".join(
            [
                tabulate(table, head, floatfmt=".2f"),
                f"{self.entries} of {self.full_entries} entries "
                f"({100 * self.entries / max(1, self.full_entries):.1f} %), "
                f"{self.mib:.1f} MiB of storage (a full cache: {self.full_mib:.1f} MiB), "
                f"{self.tokens_seen} tokens in {self.batch} sequence(s)",
                f"prefill {times['prefill']:.2f} s, compress {times['compress']:.2f} s, "
                f"decode {times['decode']:.2f} s"
                f"{per_token}{maintain}; attention by {self.attend}",
                *lines,
            ]
        )


REFRESH = ["refreshes", "outside", "held MiB", "queries MiB", "written MiB", "read MiB", "I/O s", "stopped"]


def _outside(cache) -> dict:
    full = cache.full
    asked = sum(q.nbytes for q in cache.asked.queries) if cache.asked else 0
    return {
        "refreshes": cache.times.refreshes,
        "where": str(full.where),
        "held_mib": full.nbytes / 2**20,
        "queries_mib": asked / 2**20,
        "written_mib": full.written / 2**20,
        "read_mib": full.read / 2**20,
        "io_seconds": full.seconds,
        "stopped": full.stopped,
    }
