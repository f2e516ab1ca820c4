"""Options that change a model: low-rank adapters, for `plan` and `megaloom train`, and its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from attrs import asdict, field, frozen
from cyclopts import Parameter

from .arguments import parse_names
from .settings import SetOption, SettingsOption

if TYPE_CHECKING:
    from megaloom.dsl.graph import Model


@frozen
class AdapterOptions:
    """Rank, scale and places of the adapters that are trained instead of the model's own weights."""

    lora_rank: Annotated[
        int | None, Parameter(help="Train low-rank adapters of this rank; other weights are frozen.")
    ] = None
    lora_alpha: Annotated[
        float | None,
        Parameter(help="Scale of the adapters: their outputs are multiplied by alpha / rank. [default: 2 x rank]"),
    ] = None
    lora_targets: Annotated[
        tuple[str, ...] | None,
        Parameter(
            help="Matrices with adapters, as PEFT names them: q_proj,v_proj. [default: queries and values]",
            consume_multiple=True,
            negative="",
            converter=parse_names,
        ),
    ] = None

    @property
    def given(self) -> dict[str, object]:
        """Return the options that were given, by name."""
        return {name: value for name, value in asdict(self, recurse=False).items() if value is not None}

    def added_to(self, model: Model, ref: str) -> Model:
        """Return the model with the adapters; the model itself without `--lora-rank`. Raises UserError.

        ref: the full reference of the model.
        """
        from megaloom.dsl.errors import UserError

        if self.lora_rank is None:
            if self.given:
                flag = next(iter(self.given)).replace("_", "-")
                raise UserError(f"--{flag} needs the rank of the adapters\ngive --lora-rank 16")
            return model
        from megaloom.dsl.catalog import config_of
        from megaloom.dsl.hf.architectures import open_config, reader
        from megaloom.dsl.hf.lora_targets import lora

        config = config_of(ref)
        names = reader(open_config(config)[0]).names if config else None
        return lora(model, self.lora_rank, self.lora_alpha, targets=self.lora_targets, names=names)


NO_ADAPTERS = AdapterOptions()
ADAPTERS = Parameter(name="*", group="Low-rank adapters (LoRA)")


@frozen(kw_only=True)
class ModelChanges:
    """Arguments of the model's function, a settings file, and low-rank adapters."""

    words: SetOption = field(factory=list)
    settings: SettingsOption = None
    adapters: Annotated[AdapterOptions, ADAPTERS] = NO_ADAPTERS


NO_CHANGES = ModelChanges()
