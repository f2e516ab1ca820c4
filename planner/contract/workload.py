"""Work of one optimizer step (`Workload`), its number format (`Precision`), the program that runs it (`Runtime`)."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen


class Precision(StrEnum):
    """Number format of matrix products. Master weights are always fp32.

    Formats below 16 bits hold for the matrix products inside the blocks; everything else is bf16.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"  # one scale for each tensor
    MXFP8 = "mxfp8"  # one scale for 32 elements
    NVFP4 = "nvfp4"  # one scale for 16 elements

    @property
    def nbytes(self) -> int:
        """Return the bytes of one element of an activation, or of a weight in the forward pass."""
        return 4 if self is Precision.FP32 else 2

    @property
    def narrow(self) -> bool:
        """True if the operands of matrix products have fewer than 16 bits."""
        return self in (Precision.FP8, Precision.MXFP8, Precision.NVFP4)

    @property
    def wide(self) -> Precision:
        """Return the format of everything but the matrix products inside the blocks."""
        return Precision.BF16 if self.narrow else self


class Runtime(StrEnum):
    """Program that runs a plan."""

    MEGALOOM = "megaloom"  # Megaloom's own, on megatron-core without Transformer Engine
    MEGATRON = "megatron"  # Megatron-LM and what is built like it, with Transformer Engine


class Backend(StrEnum):
    """The library whose modules compute the layers of a run, where it has them; else torch and megatron-core do."""

    AUTO = "auto"  # Transformer Engine where it can compute the run
    TORCH = "torch"
    TE = "te"  # Transformer Engine


@frozen(kw_only=True)
class Workload:
    """Work of one optimizer step, for every layout."""

    seq: int  # tokens of one sequence
    batch: int  # sequences of one step, over all devices: the global batch
    precision: Precision = Precision.BF16  # number format of matrix products

    @property
    def tokens(self) -> int:
        """Return the tokens of one step."""
        return self.seq * self.batch

    def as_saved(self) -> dict[str, int | str]:
        """Return what a checkpoint records of the workload it was trained with."""
        return {"seq": self.seq, "batch": self.batch, "precision": self.precision.value}

    def __str__(self) -> str:
        """Return the workload in words. Models of images have sequences of one token, here called inputs."""
        return f"{self.batch:,} " + (f"sequences of {self.seq:,} tokens" if self.seq > 1 else "inputs")
