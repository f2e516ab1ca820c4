"""Costs and gains of recomputing modules, for many layouts at once, and the sets of modules that are worth a try.

`ModuleRecompute.of(structure, by_part, saved)` takes the costs of all node kinds under each layout. The search only
tries `module_sets`: under each layout the one, two, … modules that free most bytes for a second of recompute.
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

FREED = 0.02  # least share of the saved activations that one module more must free


@frozen(eq=False, slots=False)
class ModuleRecompute:
    """Seconds and bytes of recompute of one micro-batch through the whole model, by layout."""

    structure: ModelStructure
    seconds: Rows  # [layouts, recompute parts] seconds that a part repeats
    freed: Rows  # [layouts, kinds, recompute parts] bytes that a part frees of one node
    saved: Rows  # [layouts] bytes of saved activations without recompute

    @classmethod
    def of(cls, structure: ModelStructure, by_part: Rows, saved: Rows) -> ModuleRecompute:
        """Return the recompute costs from those of nodes: [layouts, kinds, recompute parts, MODULE_COLUMNS]."""
        seconds = (by_part[..., :-1].sum(axis=3) * structure.kind_counts[:, None]).sum(axis=1)
        return cls(structure, seconds, by_part[..., -1], saved)

    def joined(self, more: ModuleRecompute) -> ModuleRecompute:
        """Return these base layouts followed by more of them."""
        columns = (np.concatenate([getattr(self, n), getattr(more, n)]) for n in ("seconds", "freed", "saved"))
        return ModuleRecompute(self.structure, *columns)

    def of_set(self, number: int) -> tuple[Rows, Rows, Rows]:
        """Return, for a set of modules as bits: its seconds, its freed bytes, and the most that one node frees."""
        return self._of(ModuleSet(number))

    def _of(self, modules: Iterable[Module]) -> tuple[Rows, Rows, Rows]:
        which = self.structure.recomputed_parts(modules)
        freed = self.freed[:, :, which].sum(axis=2)
        return self.seconds[:, which].sum(axis=1), freed @ self.structure.kind_counts, freed.max(axis=1)

    @cached_property
    def most(self) -> Rows:
        """Return the bytes that all modules together free: [layouts]."""
        return self._of(Module)[1]

    @cached_property
    def module_sets(self) -> Column:
        """Return the best n modules to recompute, as bits: [layouts, n]. `moe` comes after its parts."""
        modules = self.structure.modules
        each = [self._of((module,)) for module in modules]
        shape = len(modules), len(self.saved)  # no module is a legal number of modules
        seconds, freed = (np.array([one[i] for one in each]).reshape(shape) for i in (0, 1))
        with np.errstate(over="ignore"):  # what takes no time is worth infinitely much
            worth = freed / np.maximum(seconds, np.finfo(float).tiny)
        if Module.MOE in modules:
            parts = [i for i, module in enumerate(modules) if module in (*MODULES_OF_MOE, Module.MOE)]
            worth[parts[-1]] = worth[parts].min(axis=0)
        order = np.argsort(-worth, axis=0, kind="stable").T
        sets = np.cumsum(np.array([module.bit for module in modules], dtype=np.int64)[order], axis=1)
        return np.where(sets & Module.MOE.bit, sets & ~int(MODULES_OF_MOE), sets)

    @cached_property
    def worthwhile(self) -> NDArray[np.bool_]:
        """Return True where the last module of a set frees at least the share FREED: [layouts, n]."""
        freed = np.zeros((len(self.saved), 1 + self.module_sets.shape[1]))
        for number in np.flatnonzero(np.bincount(self.module_sets.ravel())).tolist():
            freed[:, 1:] = np.where(self.module_sets == number, self.of_set(number)[1][:, None], freed[:, 1:])
        worth: NDArray[np.bool_] = np.diff(freed, axis=1) >= FREED * self.saved[:, None]
        return worth
