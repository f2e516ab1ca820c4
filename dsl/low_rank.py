"""The settings of low-rank adapters."""

from __future__ import annotations

from attrs import field, frozen

from .errors import UserError

WeightGroups = tuple[tuple[str, ...], ...]
"""Weights of a layer that have adapters, by name. The weights of a group share the matrix A."""


@frozen
class LoRA:
    """Low-rank adapters of a model: of which weights, their rank, and their scale alpha / rank (arXiv:2106.09685)."""

    rank: int = field()  # columns of A, rows of B
    alpha: float = field(converter=float)  # the product x A B of an adapter is multiplied by alpha / rank
    targets: tuple[str, ...]  # names of matrices as PEFT has them, such as q_proj
    nodes: dict[str, WeightGroups] = field(hash=False)  # graph nodes with adapters, and their weights

    @rank.validator
    def _at_least_one(self, _: object, rank: int) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise UserError(f"the rank of adapters must be a whole number of at least 1, got {rank!r}")

    @alpha.validator
    def _positive(self, _: object, alpha: float) -> None:
        if not 0 < alpha < float("inf"):
            raise UserError(f"alpha of adapters must be a number above 0, got {alpha!r}")

    @property
    def scale(self) -> float:
        """Return the factor on the product x A B that an adapter adds: alpha / rank."""
        return self.alpha / self.rank
