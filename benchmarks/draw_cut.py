"""Draws docs/figures/cut.svg, how a packed batch is split, from the output of the data loader.

python -m benchmarks.draw_cut
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from torchtune_cp.data import MaskedLMCollator, cut_for_ranks

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "cut.svg"
CP, PAD = 2, 0
PROTEINS = ((1, 2, 3), (5, 6))
_BOX, _GAP, _LEFT = 44, 18, 150
_COLOURS = ("#cfe2f3", "#fce5cd")  # by rank


def _box(x: float, y: float, text: str, fill: str) -> str:
    middle = f'x="{x + _BOX / 2}" y="{y + 28}"'
    return (
        f'<rect x="{x}" y="{y}" width="{_BOX}" height="{_BOX}" fill="{fill}" stroke="#444"/>'
        f'<text {middle} text-anchor="middle">{text}</text>'
    )


def _label(y: float, text: str) -> str:
    return f'<text x="10" y="{y + 28}">{text}</text>'


def _name(token: int) -> str:
    return "pad" if token == PAD else str(token)


def draw() -> str:
    """The figure as SVG."""
    samples = [{"tokens": list(p), "labels": list(p)} for p in PROTEINS]
    whole = MaskedLMCollator("thd", PAD, divisor=2 * CP)(samples)
    slices = cut_for_ranks(whole, CP)
    ends = whole["cu_seqlens_padded"].tolist()
    parts, y = [_label(0, "proteins")], 0.0
    x = float(_LEFT)
    for protein in PROTEINS:
        for token in protein:
            parts.append(_box(x, y, str(token), "#ffffff"))
            x += _BOX
        x = _LEFT + (ends[1] * _BOX + _GAP)
    y += 80
    parts.append(_label(y, f"padded to 2 x {CP}"))
    chunks = 2 * CP
    for start, stop in pairwise(ends):
        for place in range(start, stop):
            chunk = (place - start) * chunks // (stop - start)
            owner = min(chunk, chunks - 1 - chunk)
            x = _LEFT + place * _BOX + ends.index(start) * _GAP
            parts.append(_box(x, y, _name(int(whole["tokens"][0, place])), _COLOURS[owner]))
    for rank, own in enumerate(slices):
        y += 80
        parts.append(_label(y, f"rank {rank} holds"))
        for place, token in enumerate(own["tokens"][0].tolist()):
            document = next(i for i, end in enumerate(ends[1:]) if place * CP < end)
            x = _LEFT + place * _BOX + document * _GAP
            parts.append(_box(x, y, _name(token), _COLOURS[rank]))
    width, height = _LEFT + ends[-1] * _BOX + _GAP + 10, y + _BOX + 10
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 -2 {width} {height}"'
        f' width="{width}" font-family="sans-serif" font-size="15">\n'
        f"<title>Two packed proteins cut over {CP} ranks</title>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(draw(), encoding="utf-8")
