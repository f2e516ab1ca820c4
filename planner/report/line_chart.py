"""A chart of curves over steps, as SVG that needs no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from attrs import frozen

from .charts import BOTTOM_MARGIN, LEFT_MARGIN, PLOT_HEIGHT, PLOT_WIDTH, axis_values, grid_lines

MAX_POINTS = 400  # of a curve: more are averaged
RIGHT_MARGIN, TOP_MARGIN = 20.0, 16.0  # pixels


@frozen
class Curve:
    """Values over steps, with the name and the colour for the legend."""

    name: str
    colour: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False

    @property
    def finite(self) -> tuple[tuple[float, float], ...]:
        """Return the points that can be drawn."""
        return tuple((x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y))


def line_chart(curves: Sequence[Curve], title: str) -> str:
    """Return curves as SVG, on common axes; empty if there is no point. Many points are averaged."""
    drawn = [(curve, _thinned(curve.finite)) for curve in curves if curve.finite]
    if not drawn:
        return ""
    steps = axis_values([x for _, points in drawn for x, _ in points])
    heights = [y for _, points in drawn for _, y in points]
    values = axis_values(heights if any(heights) else [0.0, 1.0])
    right, foot = PLOT_WIDTH - RIGHT_MARGIN, PLOT_HEIGHT - BOTTOM_MARGIN

    def at(x: float, y: float) -> str:
        across = (x - steps[0]) / (steps[-1] - steps[0])
        up = (y - values[0]) / (values[-1] - values[0])
        return f"{LEFT_MARGIN + across * (right - LEFT_MARGIN):.1f},{foot - up * (foot - TOP_MARGIN):.1f}"

    lines = "\n".join(_line(curve, [at(x, y) for x, y in points]) for curve, points in drawn)
    size = f'viewBox="0 0 {PLOT_WIDTH:g} {PLOT_HEIGHT:g}" width="{PLOT_WIDTH:g}" height="{PLOT_HEIGHT:g}"'
    middle, below = (LEFT_MARGIN + right) / 2, PLOT_HEIGHT - 8
    return "\n".join(
        [
            f'<svg {size} role="img" aria-label="{escape(title)}">',
            *grid_lines(steps, values),
            f'<text x="{middle:g}" y="{below:g}" text-anchor="middle">step</text>',
            lines,
            "</svg>",
        ]
    )


def _line(curve: Curve, points: Sequence[str]) -> str:
    """Return a curve; a single point is a dot."""
    dashes = ' stroke-dasharray="5 4"' if curve.dashed else ""
    first, last = curve.finite[0], curve.finite[-1]
    tooltip = f"<title>{escape(curve.name)}: {first[1]:g} at step {first[0]:g}, {last[1]:g} at step {last[0]:g}</title>"
    if len(points) == 1:
        x, _, y = points[0].partition(",")
        return f'<g>{tooltip}<circle cx="{x}" cy="{y}" r="3" fill="{curve.colour}"/></g>'
    return (
        f'<g>{tooltip}<polyline points="{" ".join(points)}" fill="none" stroke="{curve.colour}" '
        f'stroke-width="1.5"{dashes}/></g>'
    )


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most MAX_POINTS points, each the mean of as many neighbours."""
    size = -(-len(points) // MAX_POINTS)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
