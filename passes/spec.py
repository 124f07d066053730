"""The vocabulary of the pipeline: what was captured, what was found, what will be done, what was refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from kvpass.kernels.frame import Frame

CONSTANT = "kvpass_"  # begins the name of an fp32 tensor that the rewriting made, and no weight of the model


@dataclass(frozen=True)
class Refusal:
    """Why a model, or one layer of it, is left alone."""

    reason: str  # one clause, e.g. "the mask is bidirectional"
    layer: str = "model"  # module path
    node: str = ""  # graph node it was read at
    source: str = ""  # file:line of the model's own code
    hint: str = ""  # what the user can do

    def __str__(self) -> str:
        place = f" at node {self.node}" if self.node else ""
        place += f" ({self.source})" if self.source else ""
        return f"{self.layer}: {self.reason}{place}" + (f"; {self.hint}" if self.hint else "")


class KVPassError(Exception):
    """Base of everything kvpass raises on purpose."""


class UnsupportedModelError(KVPassError):
    """The model cannot be rewritten soundly; ``refusals`` says where and why. The model is unchanged."""

    def __init__(self, refusals: tuple[Refusal, ...]):
        self.refusals = refusals
        super().__init__("cannot compile this model: " + "; ".join(str(refusal) for refusal in refusals))


@dataclass(frozen=True)
class Sizes:
    """Concrete sizes to evaluate a symbolic graph with."""

    batch: int
    length: int
    keep: int = 1


@dataclass(frozen=True)
class Captured:
    """One functional ATen graph ``(input_ids, position_ids, attention_mask[, keep]) -> logits``."""

    module: GraphModule
    inputs: tuple[str, ...]  # names of the placeholders, in order
    symbols: Mapping[object, str]  # sympy symbol -> "batch", "length" or "keep"

    @property
    def graph(self):
        return self.module.graph

    def placeholder(self, name: str) -> Node | None:
        return next((node for node in self.graph.nodes if node.op == "placeholder" and node.target == name), None)


@dataclass(frozen=True)
class MaskTerm:
    """One mask or bias applied to the logits: additive, or boolean."""

    node: Node
    at: Node  # the logits it meets, whose shape it is broadcast to
    hides: bool = False  # True where a key is hidden, as in masked_fill; else True where it may be seen
    boolean: bool = False  # chooses keys instead of being added
    multiplies: bool = False  # 1 where a key may be seen; where it is 0 another mask must hide the key
    factor: float = 1.0  # of what is added


@dataclass(frozen=True)
class Logits:
    """The expression under a softmax, read backwards to its contraction over the head dimension."""

    operands: tuple[Node, Node]  # of the contraction, in the order they are written
    core: Node | None = None  # the logits before the first mask
    core_scale: float = 1.0  # their scale; what scales later scales the masks as well
    views: tuple[tuple[Node, Node], ...] = ()  # changes of shape after the first mask: before and after
    scale: float = 1.0
    softcap: float = 0.0
    masks: tuple[MaskTerm, ...] = ()
    sinks: Node | None = None
    causal: bool = False  # SDPA's is_causal flag
    steps: tuple[str, ...] = ()  # what was applied, first to last


@dataclass(frozen=True)
class Mask:
    """What a layer's queries may see, besides padding, which is always masked."""

    window: int = 0  # 0: causal over everything; W: the last W positions, the query's own included
    chunk: int = 0  # C: of those, the positions of the query's own chunk [n * C, n * C + C)

    def __str__(self) -> str:
        if self.chunk:
            return f"chunked({self.chunk})"
        return f"sliding({self.window})" if self.window else "causal"


@dataclass(frozen=True)
class Layouts:
    """How a site's operands and its output lie, in the letters of :mod:`kvpass.passes.layouts`."""

    q: str = "bhsd"
    k: str = "bhsd"
    v: str = "bhsd"
    output: str = "bhsd"


@dataclass(frozen=True)
class Projection:
    """The weight that a site's output is multiplied with, all heads side by side."""

    weight: str  # name of the parameter
    input_first: bool  # [Hq*Dv, E]; else [E, Hq*Dv]


@dataclass(frozen=True)
class Site:
    """One attention of the graph, from its query, key and value nodes to the node that holds its output."""

    layer: str  # module path
    anchor: Node  # the SDPA or softmax node
    output: Node  # replaced by the operator
    q: Node
    k: Node  # before any repetition over the group
    v: Node
    layouts: Layouts
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    logits: Logits
    mask: Mask | None = None  # set by `classify`
    slopes: tuple[float, ...] = ()  # per query head, of a bias linear in the key's position (ALiBi); set by `classify`
    turns: bool = False  # from here on set by `inputs`: the key depends on its position
    frame: Frame | None = None
    frame_note: str = ""  # why a key that turns has no frame
    out: Projection | None = None
    hidden: Node | None = None  # [B, S, E]: all that q, k and v are made of

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    def __str__(self) -> str:
        text = f"{self.heads}q/{self.kv_heads}kv x {self.key_dim}"
        text += f"/{self.value_dim}" if self.value_dim != self.key_dim else ""
        text += f", scale {self.logits.scale:.6g}"
        text += f", softcap {self.logits.softcap:g}" if self.logits.softcap else ""
        text += ", ALiBi" if self.slopes else ""
        return text + (", sinks" if self.logits.sinks is not None else "")


@dataclass(frozen=True)
class Ignored:
    """A softmax that is not attention over the sequence."""

    layer: str
    node: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """Everything the analysis found; complete when there is no refusal."""

    captured: Captured
    sites: tuple[Site, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    ignored: tuple[Ignored, ...] = ()

    @property
    def windows(self) -> tuple[int, ...]:
        """Distinct windows of the sites, in order; 0 stands for full attention."""
        return tuple(dict.fromkeys(site.mask.window for site in self.sites if site.mask))


@dataclass(frozen=True)
class LayerSpec:
    """What the cache of one attention has to hold."""

    layer: str  # module path
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int  # 0 = full attention
    chunk: int = 0  # of a chunked mask, whose window is the same number
    position_channels: int = 0  # last channels of the key that hold its position (ALiBi); counted in key_dim
    turns: bool = False  # the key depends on its position
    frame: Frame | None = None  # how it turns, where that could be read
    out: Projection | None = None
    hidden: str | None = None  # node of the program that holds the attention's input [B, S, E]


@dataclass(frozen=True)
class Program:
    """A rewritten graph and the names of its inputs, in order."""

    module: GraphModule
    layers: tuple[LayerSpec, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(node.target for node in self.module.graph.nodes if node.op == "placeholder")
