"""Options of `plan` for a training run of so many tokens: the time for it, and the price of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen
from cyclopts import Parameter

if TYPE_CHECKING:
    from megaloom.planner.report.token_budget import TokenBudget

_GROUP = "Days, GPU-hours and money of a training run"


@Parameter(name="*", group=_GROUP)
@frozen(kw_only=True)
class BudgetOptions:
    """Tokens to train on, the time for them, and the price of a device."""

    tokens: str | None = None
    (
        "Tokens to train on, such as 300B, 15.6T or 1e12; for a model of images, inputs. Prints the days and GPU-hours "
        "that they take, with failures."
    )
    within: str | None = None
    """Longest time for the tokens, such as 12h, 30d or 2w. Prints the smallest cluster of a range that is enough."""
    price: float | None = None
    """Price of a GPU-hour, in any currency. Prints the money for the tokens."""

    def budget(self) -> TokenBudget | None:
        """Return the tokens with their time and price; None if no option is given. Raise UserError for wrong ones."""
        if self == NO_BUDGET:
            return None
        from megaloom.planner.report.token_budget import TokenBudget

        return TokenBudget.parse(self.tokens, self.within, self.price)

    def check_searched(self, *, lint: bool, pareto: bool) -> None:
        """Raise UserError if an option is given where no plan is searched, or time where slower plans are wanted."""
        from megaloom.dsl.errors import UserError

        given = [flag for flag, value in self._flags if value is not None]
        if given and lint:
            raise UserError(f"{given[0]} has no effect with --lint, which searches nothing\ndrop it")
        if pareto and self.within is not None:
            raise UserError("--pareto shows slower layouts too, and --within asks for the fastest\ndrop one of them")

    @property
    def _flags(self) -> tuple[tuple[str, str | float | None], ...]:
        return ("--tokens", self.tokens), ("--within", self.within), ("--price", self.price)


NO_BUDGET = BudgetOptions()
