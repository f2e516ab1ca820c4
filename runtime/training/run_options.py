"""All options of a run that its plan does not decide: the schema from which its users take them.

A new option is a field of its group. It is then an option of the command line and of settings files, is kept in
run.json, is named by a resumed run if it has changed, is compared between ranks, and is part of the command to train
further, as far as it states. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from attrs import evolve, field, fields, frozen
from cyclopts import Parameter

from megaloom.dsl.errors import UserError
from megaloom.runtime.metrics.monitoring import Monitoring
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.options.groups import DataOptions, EvaluationOptions, KernelOptions, SavingOptions, StartOptions
from megaloom.runtime.options.option import Option
from megaloom.runtime.options.units import units_of
from megaloom.runtime.samples.end_of_document import EndOfDocument


@frozen(kw_only=True)
class RunOptions:
    """Options of a run, in groups, with the heading of each group in the help of the command line."""

    data: Annotated[DataOptions, Parameter(name="*")] = field(factory=DataOptions)
    start: Annotated[StartOptions, Parameter(name="*")] = field(factory=StartOptions)
    kernels: Annotated[KernelOptions, Parameter(name="*")] = field(factory=KernelOptions)
    saving: Annotated[SavingOptions, Parameter(name="*")] = field(factory=SavingOptions)
    evaluation: Annotated[EvaluationOptions, Parameter(name="*", group="Evaluation")] = field(factory=EvaluationOptions)
    ends: Annotated[EndOfDocument, Parameter(name="*", group="End of document")] = field(factory=EndOfDocument)
    monitoring: Annotated[Monitoring, Parameter(name="*", group="Monitoring")] = field(factory=Monitoring)
    recipe: Annotated[Recipe, Parameter(name="*", group="Recipe")] = field(factory=Recipe)

    @property
    def folder(self) -> Path:
        """Return the folder of the run, which must be known."""
        assert self.saving.out is not None, "a run has a folder"
        return self.saving.out

    def value(self, option: Option) -> Any:
        """Return the value of an option."""
        return getattr(getattr(self, option.group), option.name)

    def changed(self, **given: Any) -> RunOptions:
        """Return the options with other values: of some options by name, or of groups that are no option's name.

        Raise UserError for a name that no option has.
        """
        whole = {name: given.pop(name) for name in GROUPS if name in given and name not in OPTIONS}
        for name in given:
            if name not in OPTIONS:
                near = get_close_matches(name, [*OPTIONS, *GROUPS], 1)
                meant = f": did you mean {near[0]}?" if near else ""
                raise UserError(
                    f"a run has no option {name!r}{meant}\nits options are those of `megaloom train --help`"
                )
        named = {group: {n: v for n, v in given.items() if OPTIONS[n].group == group} for group in GROUPS}
        options = evolve(self, **whole)
        return evolve(options, **{group: evolve(getattr(options, group), **new) for group, new in named.items() if new})

    def words(self, *always: str) -> Iterator[str]:
        """Yield the words of a command that repeats the options: of those beside their defaults, and of some always."""
        for option in OPTIONS.values():
            value = self.value(option)
            if option.repeated and (value != option.default or option.name in always):
                yield from option.words(value)

    def compared(self) -> dict[str, str]:
        """Return the options in which ranks must agree, by flag."""
        return {o.flag: o.text(self.value(o)) for o in OPTIONS.values() if o.compared}


GROUPS = {f.name: type(getattr(RunOptions(), f.name)) for f in fields(RunOptions)}
OPTIONS: Mapping[str, Option] = {
    f.name: Option.of(name, f, units_of(group).get(f.name)) for name, group in GROUPS.items() for f in fields(group)
}
"""All options of a run by name, in the order of the command line."""
