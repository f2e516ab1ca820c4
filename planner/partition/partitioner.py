"""What the stages of a layout hold, and which ways to cut the graph fit the memory.

Protocol: a `Fit` is one layout with its sheet, a `Placed` that and one way to cut it. Bounds are positions in the
graph's nodes, one more than stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from attrs import frozen

from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout, Workload
from megaloom.planner.contract.layouts import Rows
from megaloom.planner.cost import memory
from megaloom.planner.cost.cost_table import STEP, Col, Sheet
from megaloom.planner.cost.framework_profiles import OWN, FrameworkProfile
from megaloom.planner.cost.memory import MORE, Part
from megaloom.planner.simulate import schedule

from .dynamic_program import evenest
from .local_search import (
    SLOWER,
    evened,
    joint,
    leveled,
)
from .memory_limit import SAME, Rooms, reach
from .segments import Places, Spans, Vector

# What a plan leaves free: the prediction is not exact, and an allocator that is nearly full stalls.
HEADROOM = 0.05

Bounds = tuple[int, ...]


def capacity(cluster: Cluster, headroom: float = HEADROOM) -> int:
    """Bytes of a device that a plan may fill."""
    return int(cluster.device.nbytes * (1 - headroom))


@frozen(eq=False, slots=False)
class Fit:
    """A layout, and what the nodes of the graph cost under it."""

    layout: Layout
    sheet: Sheet
    workload: Workload
    cluster: Cluster
    profile: FrameworkProfile = OWN
    headroom: float = HEADROOM
    whole: bool = False  # whether stages begin and end with whole blocks

    @property
    def microbatches(self) -> int:
        """In a step, on each data-parallel copy."""
        return self.layout.microbatches(self.workload.batch)

    @cached_property
    def places(self) -> Places:
        """Where a stage may begin or end."""
        structure = self.sheet.structure
        return structure.block_cut_points if self.whole else structure.cut_points

    @cached_property
    def seconds(self) -> Spans:
        """Of a micro-batch between each two places, both ways."""
        return self.sheet.runs(self.places, STEP)

    def even(self) -> Bounds:
        """The most even cut in time, whatever it holds. There must be places for so many stages."""
        bounds = self._bounds(evenest(self.seconds, self.layout.pp * self.layout.vpp))
        assert bounds is not None, "more stages than the graph can be cut into"
        return bounds

    def reaches(self, seconds: float) -> bool:
        """Whether stages may all be as quick as this, whatever they hold."""
        far = np.maximum.accumulate(self.seconds.far(seconds * SAME))
        return reach(far, self.layout.pp * self.layout.vpp) is not None

    def level(self, even: Bounds) -> Bounds:
        """Interleaved chunks, whatever they hold, the slowest as quick as in the most even cut: see `leveled`."""
        bounds = self._bounds(leveled(self.seconds, self.cut(even), self.layout.pp))
        assert bounds is not None
        return bounds

    def roomy(self, even: Bounds) -> Bounds | None:
        """A cut that fits the memory, if one is found: with as quick a slowest stage as can be, see `joint`.

        `even` is the most even one, whatever it holds.
        """
        cut = self.cut(even)
        fits = self.rooms.lacks(cut[None])[0] <= 0
        if self.layout.vpp == 1:
            return even if fits else self._bounds(evenest(self.seconds, self.layout.pp, self.rooms.latest))
        return self._bounds(evened(self.seconds, cut, self.rooms) if fits else joint(self.seconds, cut, self.rooms))

    def hopeful(self, even: Bounds) -> bool:
        """Whether a cut that fits the memory may be found, if weights that stages share are counted as often.

        `even` is the most even one, whatever it holds.
        """
        if self.layout.vpp == 1:
            return self.rooms.enough
        cut = self.cut(even)
        return not self.rooms.hopeless(self.seconds, SLOWER * float(self.seconds(cut[:-1], cut[1:]).max()))

    def cut(self, bounds: Bounds) -> Places:
        """Bounds as the numbers of their places."""
        return self.places.searchsorted(bounds)

    def _bounds(self, cut: Sequence[int] | Places | None) -> Bounds | None:
        return None if cut is None else tuple(int(self.places[i]) for i in cut)

    def parts(self, bounds: Bounds) -> list[Part]:
        """What each stage holds. A weight that several nodes of a rank share is there once."""
        sheet, last = self.sheet, len(bounds) - 2
        spare, (received, passed) = self.spare(bounds), self._crossing(np.array(bounds[:-1]))
        return [
            Part(
                params=int(row[Col.PARAMS]) - spare[i],
                expert_params=int(row[Col.EXPERT_PARAMS]),
                saved=int(row[Col.SAVED]) + int(received[i]),
                workspace=sheet.workspace,
                library=sheet.library + int(passed[i]),
                loss=sheet.loss if i == last else 0,
            )
            for i, row in enumerate(sheet.sums(bounds))
        ]

    def _crossing(self, begin: Places) -> tuple[Places, Places]:
        """Bytes that stages keep of each micro-batch because they begin at these nodes, and for what passes to them."""
        x, boundary = self.layout, self.sheet.boundary
        crosses = self.sheet.structure.live_values[begin]
        times = (memory.PASSED + (x.pp if self.profile.outputs else 0)) if x.pp > 1 else 0
        return boundary * crosses, times * boundary * np.maximum(1, crosses)

    def spare(self, bounds: Bounds) -> list[int]:
        """The elements that each stage counts of weights that it, or an earlier stage of its rank, has already."""
        spare = [0] * (len(bounds) - 1)
        for (_, nodes), elements in zip(self.sheet.structure.shared_weights, self.sheet.shared, strict=True):
            seen: set[int] = set()
            for stage in stages_of(nodes, bounds):
                spare[stage] += elements * (stage % self.layout.pp in seen)
                seen.add(stage % self.layout.pp)
        return spare

    @cached_property
    def rooms(self) -> Rooms:
        """What the ranks of a cut need. A weight that several nodes of a rank share is counted as often."""
        x, sheet = self.layout, self.sheet
        params, experts, saved = (sheet.runs(self.places, [c]) for c in (Col.PARAMS, Col.EXPERT_PARAMS, Col.SAVED))
        static, stepping = self._each
        state, step = (params.times(each[0]).plus(experts, each[1]) for each in (static, stepping))
        flights, backs = schedule.sets(x.pp, x.vpp, self.microbatches, x.microbatch_group)
        comes = np.zeros(flights.shape[:2])
        comes[:, :backs], comes[-1, backs:] = sheet.workspace, sheet.loss
        received, passed = (MORE * nbytes.astype(float) for nbytes in self._crossing(self.places))
        return Rooms(
            state=state,
            stepping=state.plus(step, MORE),
            saved=saved.times(MORE),
            flights=flights,
            comes=MORE * comes,
            received=received,
            passed=passed,
            beside=memory.runtime(x, self.cluster, self.profile) + MORE * sheet.library,
            room=capacity(self.cluster, self.headroom),
            element=(static[0], static[0] + MORE * stepping[0]),
        )

    @property
    def _each(self) -> tuple[list[float], list[float]]:
        """Bytes of each element of dense weights, and of experts': of the state, and of the optimizer's step."""
        n, x, precision, profile = 10**6, self.layout, self.workload.precision, self.profile
        alone = ((n, 0), (0, n))
        static = [sum(memory.static(*of, x, precision, profile).values()) / n for of in alone]
        return static, [memory.stepping(*of, x, profile) / n for of in alone]


@frozen(eq=False, slots=False)
class Placed:
    """A layout whose stages have a place: what each pipeline rank then holds."""

    fit: Fit
    bounds: Bounds

    @property
    def layout(self) -> Layout:
        """The layout that is placed."""
        return self.fit.layout

    @property
    def capacity(self) -> int:
        """Bytes of a device that may be filled."""
        return capacity(self.fit.cluster, self.fit.headroom)

    @cached_property
    def parts(self) -> list[Part]:
        """What each stage holds."""
        return self.fit.parts(self.bounds)

    @cached_property
    def fullest(self) -> tuple[memory.Peak, ...]:
        """The memory of each pipeline rank at its fullest."""
        layout, m, precision = self.layout, self.fit.microbatches, self.fit.workload.precision
        beside = memory.runtime(layout, self.fit.cluster, self.fit.profile)
        ranks = range(layout.pp)
        profile = self.fit.profile
        return tuple(memory.peak(self.parts[r :: layout.pp], r, layout, m, precision, beside, profile) for r in ranks)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The bytes that each pipeline rank holds at its fullest."""
        return tuple(peak.nbytes for peak in self.fullest)

    @cached_property
    def excess(self) -> int:
        """Bytes that the fullest rank lacks; negative when there is room."""
        return int(self._needed.max()) - self.capacity

    @property
    def _needed(self) -> Vector:
        """The bytes of each pipeline rank at its fullest: those of `fullest`, to a few bytes, and sooner."""
        fit, x = self.fit, self.layout
        twice = np.array(fit.spare(self.bounds)).reshape(x.vpp, x.pp).sum(axis=0)
        needed: Vector = fit.rooms.needed(fit.cut(self.bounds)[None], twice)[0]
        return needed

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory for its stages."""
        return self.excess <= 0

    def roomy(self) -> Placed:
        """The same layout cut to fit the memory if that can be, and to be quick; `self` is its most even cut."""
        bounds = self.fit.roomy(self.bounds)
        return self if bounds is None else Placed(self.fit, bounds)

    @cached_property
    def sums(self) -> Rows:
        """What each stage costs for a micro-batch: [stages, columns]."""
        return self.fit.sheet.sums(self.bounds)

    @property
    def seconds(self) -> list[float]:
        """Those of a micro-batch through each stage, both ways."""
        seconds: list[float] = self.sums[:, STEP].sum(axis=1).tolist()
        return seconds


def stages_of(nodes: tuple[int, ...], bounds: Bounds) -> list[int]:
    """The stage of each of these nodes."""
    return [bisect_right(bounds, node) - 1 for node in nodes]
