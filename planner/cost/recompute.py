"""What it takes to compute modules again, and what that frees, at many places at once; and which are worth it.

Protocol: `ModuleRecompute` has the parts of a model's modules by place. `family` are the sets of modules that a search looks
at: at each place the one, two, … modules that free the most bytes for a second of computing them again. `worthwhile`
says of which the last one frees enough to matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from megaloom.planner.contract.choices import MODULES_OF_MOE, Module, ModuleSet
from megaloom.planner.contract.layouts import Column, Rows
from megaloom.planner.model.structure import ModelStructure

FREED = 0.02  # of what is saved: what one module more frees at the least


@frozen(eq=False, slots=False)
class ModuleRecompute:
    """The parts of the modules at some places. Seconds and bytes are of one micro-batch and of the whole model."""

    structure: ModelStructure
    made: Rows  # [places, parts]: seconds that it takes again
    freed: Rows  # [places, kinds, parts]: bytes
    saved: Rows  # [places]: bytes when nothing is computed again

    @classmethod
    def of(cls, structure: ModelStructure, again: Rows, saved: Rows) -> ModuleRecompute:
        """From the lines of a book: [places, kinds, parts, MODULE_COLUMNS]."""
        made = (again[..., :-1].sum(axis=3) * structure.kind_counts[:, None]).sum(axis=1)
        return cls(structure, made, again[..., -1], saved)

    def joined(self, more: ModuleRecompute) -> ModuleRecompute:
        """Return these base layouts followed by more of them."""
        columns = (np.concatenate([getattr(self, n), getattr(more, n)]) for n in ("made", "freed", "saved"))
        return ModuleRecompute(self.structure, *columns)

    def of_set(self, number: int) -> tuple[Rows, Rows, Rows]:
        """What a set of modules takes again, what it frees, and what of this comes back at once: of each place."""
        return self._of(ModuleSet(number))

    def _of(self, modules: Iterable[Module]) -> tuple[Rows, Rows, Rows]:
        which = self.structure.recomputed_parts(modules)
        freed = self.freed[:, :, which].sum(axis=2)
        return self.made[:, which].sum(axis=1), freed @ self.structure.kind_counts, freed.max(axis=1)

    @cached_property
    def most(self) -> Rows:
        """Bytes that all modules together free: [places]."""
        return self._of(Module)[1]

    @cached_property
    def family(self) -> Column:
        """[places, counts]: the n modules that are best computed again, as bits; `moe` only after its parts."""
        modules = self.structure.modules
        each = [self._of((module,)) for module in modules]
        seconds, freed = (np.array([one[i] for one in each]).reshape(len(modules), -1) for i in (0, 1))
        worth = freed / np.maximum(seconds, np.finfo(float).tiny)
        if Module.MOE in modules:
            parts = [i for i, module in enumerate(modules) if module in (*MODULES_OF_MOE, Module.MOE)]
            worth[parts[-1]] = worth[parts].min(axis=0)
        order = np.argsort(-worth, axis=0, kind="stable").T
        sets = np.cumsum(np.array([module.bit for module in modules], dtype=np.int64)[order], axis=1)
        return np.where(sets & Module.MOE.bit, sets & ~int(MODULES_OF_MOE), sets)

    @cached_property
    def worthwhile(self) -> NDArray[np.bool_]:
        """[places, counts]: whether the last module of a set frees what is worth the trouble."""
        freed = np.zeros((len(self.saved), 1 + self.family.shape[1]))
        for number in np.flatnonzero(np.bincount(self.family.ravel())).tolist():
            freed[:, 1:] = np.where(self.family == number, self.of_set(number)[1][:, None], freed[:, 1:])
        worth: NDArray[np.bool_] = np.diff(freed, axis=1) >= FREED * self.saved[:, None]
        return worth
