"""The shapes that are measured, and the target of each. Data only.

Quantisers read bfloat16 and write tcgen scales. Products multiply bfloat16 activations with
quantised weights. The targets are ratios to what is measured in the same run, or fractions of a
floor; those of the smallest shapes are times, of an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from .targets import Target

__all__ = [
    "DENSE",
    "DENSE_PRODUCTS",
    "GROUPED",
    "GROUPED_PRODUCTS",
    "DenseProduct",
    "DenseShape",
    "GroupedShape",
    "Layer",
]


# --- quantisers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseShape:
    """A matrix to quantise.

    Attributes
    ----------
    rows, columns
    in_l2
        Rotate few enough inputs that they stay in the second-level cache, where the kernel that
        made them leaves them: how the limits of the smallest shapes were found. Otherwise so many
        that each comes from memory.
    limits
        Format -> longest time in microseconds; without it 0.95 of a copy's speed is the target.
    most_us
        A time that is enough whatever the copy does.
    """

    rows: int
    columns: int
    in_l2: bool = False
    limits: tuple[tuple[str, float], ...] = ()
    most_us: float | None = None
    judged: bool = True

    @property
    def label(self) -> str:
        """Such as ``512 x 7168``."""
        return f"{self.rows} x {self.columns}" + (", in L2" if self.in_l2 else "")

    def target(self, fmt: str) -> Target | None:
        """What a format must reach here."""
        if not self.judged:
            return None
        if self.limits:
            return Target(us=dict(self.limits)[fmt])
        return Target(0.95, "copy", self.most_us)


@dataclass(frozen=True)
class GroupedShape:
    """Ranges of rows to quantise.

    Attributes
    ----------
    experts
    rows
        In all.
    skewed
        All rows belong to one expert.
    decode
        A handful of rows, each of some expert: its target is a time.
    in_l2
        As in :class:`DenseShape`.
    """

    experts: int
    rows: int
    columns: int = 4096
    skewed: bool = False
    decode: bool = False
    in_l2: bool = False

    @property
    def label(self) -> str:
        """Such as ``256 experts x 192 rows``."""
        if self.decode:
            return f"{self.experts} experts, {self.rows} rows" + (", in L2" if self.in_l2 else "")
        each = f"{self.experts} experts x {self.rows // self.experts} rows"
        return each + (", all on one" if self.skewed else "")

    def target(self) -> Target:
        """What it must reach."""
        return Target(us=3.0) if self.decode else Target(0.9, "dense")


def _limits(mxfp8: float, mxfp4: float, nvfp4: float) -> tuple[tuple[str, float], ...]:
    """1.1 times the microseconds of a hand-written baseline for the three kinds of format."""
    baseline = {"mxfp8_e4m3": mxfp8, "mxfp8_e5m2": mxfp8, "mxfp4": mxfp4, "nvfp4": nvfp4}
    return tuple((fmt, round(1.1 * us, 2)) for fmt, us in baseline.items())


DENSE = (
    DenseShape(8192, 7168),
    DenseShape(512, 7168, most_us=4.0),
    DenseShape(8192, 2880),
    DenseShape(65536, 7168),
    DenseShape(1, 7168, in_l2=True, limits=_limits(1.3, 1.4, 1.4)),
    DenseShape(32, 7168, in_l2=True, limits=_limits(1.4, 1.6, 1.8)),
    DenseShape(1, 7168, judged=False),
    DenseShape(32, 7168, judged=False),
)

GROUPED = (
    GroupedShape(256, 256 * 192),
    GroupedShape(256, 256 * 192, skewed=True),
    GroupedShape(128, 128 * 192),
    GroupedShape(32, 32 * 192),
    GroupedShape(8, 8 * 192),
    GroupedShape(48, 48 * 48),
    GroupedShape(256, 256 * 768),
    GroupedShape(8, 8 * 3072),
    *(GroupedShape(256, rows, decode=True) for rows in (8, 16, 32, 64)),
    GroupedShape(256, 64, decode=True, in_l2=True),
)


# --- products -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseProduct:
    """Rows of bfloat16 times a quantised matrix [columns, depth].

    Attributes
    ----------
    ratio, reference
        The target: of the ``"floor"``, or of cuBLAS: ``"cuBLAS"`` on the same shape,
        ``"cuBLAS 8192"`` its operations a second on 8192 x 8192 x 8192.
    exclusive
        Faster than, not as fast as.
    """

    columns: int
    depth: int
    rows: int
    ratio: float
    reference: str = "floor"
    exclusive: bool = False

    @property
    def label(self) -> str:
        """Such as ``8192 x 8192, 16 rows``."""
        return f"{self.columns} x {self.depth}, {self.rows} row{'s' * (self.rows != 1)}"

    def target(self) -> Target:
        """What it must reach."""
        return Target(self.ratio, self.reference, exclusive=self.exclusive)


DENSE_PRODUCTS = (
    *(DenseProduct(8192, 8192, m, r) for m, r in ((1, 0.80), (8, 0.75), (16, 0.65))),
    *(DenseProduct(28672, 4096, m, r) for m, r in ((1, 0.88), (8, 0.85), (16, 0.78))),
    *(DenseProduct(8192, 8192, m, 1.0, "cuBLAS", exclusive=True) for m in (32, 64)),
    *(DenseProduct(33792, 8192, m, 1.0, "cuBLAS 8192") for m in (128, 256)),
    DenseProduct(8192, 8192, 4096, 0.97, "cuBLAS"),
)


@dataclass(frozen=True)
class Layer:
    """One projection of a layer of experts.

    Attributes
    ----------
    name
    experts, columns, depth, top_k
        Weights [experts, columns, depth]; a token goes to `top_k` experts.
    gathered
        The rows are gathered from the tokens ("up"), not sorted beforehand ("down").
    targets
        Format -> tokens -> (floor, target, best peer with bfloat16 activations) in microseconds on
        an H200; the target is the fraction floor / target.
    e4m3
        Microseconds of the best peer with MXFP4 weights and e4m3 activations by token, by TOKENS.
    """

    name: str
    experts: int
    columns: int
    depth: int
    top_k: int
    gathered: bool
    targets: tuple[tuple[str, tuple[tuple[int, float, float, float], ...]], ...]
    e4m3: tuple[float, ...] = ()

    def label(self, tokens: int) -> str:
        """Such as ``gpt-oss-120b down, 32 tokens``."""
        return f"{self.name}, {tokens} token{'s' * (tokens != 1)}"

    def figures(self, fmt: str) -> dict[int, tuple[float, float, float]]:
        """Tokens -> (floor, target, best peer) of a format; mxfp8 has none."""
        return {tokens: rest for tokens, *rest in dict(self.targets).get(fmt, ())}  # type: ignore[misc]

    def target(self, fmt: str, tokens: int) -> Target | None:
        """What a format must reach with so many tokens."""
        known = self.figures(fmt).get(tokens)
        if known is None:
            return None
        floor, target, _ = known
        return Target(round(floor / target, 4), "floor")


TOKENS = (1, 32, 512, 8192)


def _figures(fmt: str, *rows: tuple[float, float, float]):  # type: ignore[no-untyped-def]
    return fmt, tuple((tokens, *row) for tokens, row in zip(TOKENS, rows, strict=True))


GROUPED_PRODUCTS = (
    Layer("gpt-oss-120b down", 128, 2880, 2880, 4, False, (
        _figures("mxfp4", (4.1, 8.2, 15.3), (82.7, 92, 135.5), (136.7, 161, 265.4),
                 (688.1, 748, 1293)),),
        (15.2, 185.8, 321.3, 1001)),
    Layer("gpt-oss-120b up", 128, 5760, 2880, 4, True, (
        _figures("mxfp4", (8.2, 13.7, 21.4), (165.1, 183, 253.8), (268.5, 316, 511.8),
                 (1376.2, 1496, 2471)),),
        (25, 356.4, 620.1, 1908)),
    Layer("Mixtral 8x7B down", 8, 4096, 14336, 2, False, (
        _figures("mxfp4", (14.5, 19.3, 28.0), (58.6, 65, 92.7), (152.2, 179, 332.7),
                 (2435.6, 2647, 2917)),
        _figures("nvfp4", (15.4, 21, 28.7), (62.0, 69, 105.4), (152.2, 179, 343.5),
                 (2435.6, 2647, 2917)),),
        (24.8, 63.7, 160, 1694.2)),
    Layer("Mixtral 8x7B up", 8, 28672, 4096, 2, True, (
        _figures("mxfp4", (29.0, 39, 48.8), (117.0, 130, 176.2), (304.5, 358, 617.7),
                 (4871.3, 5295, 6014)),
        _figures("nvfp4", (30.8, 41, 51.2), (123.8, 138, 205.6), (304.5, 358, 686.3),
                 (4871.3, 5295, 6014)),),
        (37.2, 136, 382.6, 3476)),
    Layer("DeepSeek-V3 up", 256, 4096, 7168, 8, True, (
        _figures("mxfp4", (29.1, 39, 47.3), (588.5, 654, 863.6), (950.1, 1118, 1662.5),
                 (4871.3, 5295, 7895.3)),),
        (33.3, 587.5, 1065.4, 4371.4)),
    Layer("Qwen3-30B-A3B down", 128, 2048, 768, 8, False, (
        _figures("mxfp4", (1.6, 4.2, 8.9), (22.1, 25, 40.4), (30.2, 36, 70.8),
                 (261.0, 284, 494.3)),),
        (10.4, 40.1, 55.5, 307.8)),
    Layer("Qwen3-30B-A3B up", 128, 1536, 2048, 8, True, (
        _figures("mxfp4", (3.1, 6.9, 12.3), (43.9, 49, 72.8), (56.6, 67, 112.8),
                 (521.9, 567, 844.7)),),
        (11.6, 57.5, 75.9, 459.3)),
)  # fmt: skip
