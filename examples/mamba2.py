"""Mamba-2 (Dao & Gu, arXiv:2405.21060): state spaces and nothing else."""

from megaloom.dsl import Dim, Embed, Mamba2, Model, RMSNorm, Unembed, ids, model, repeat, residual, weight


def mamba2(
    name: str, layers: int, embed: int, *, head_dim: int = 64, state: int = 128, groups: int = 1, vocab: int = 50288
) -> Model:
    """A Mamba-2 of any size, twice as wide inside as outside."""
    wte = weight("wte", Dim("vocab", vocab), Dim("embed", embed))
    block = residual(RMSNorm(), Mamba2(heads=2 * embed // head_dim, head_dim=head_dim, state=state, groups=groups))
    return model(name, ids() >> Embed(wte) >> repeat(layers, block) >> RMSNorm() >> Unembed(wte))


def mamba2_130m() -> Model:
    return mamba2("mamba2-130m", 24, 768)


def mamba2_370m() -> Model:
    return mamba2("mamba2-370m", 48, 1024)


def mamba2_780m() -> Model:
    return mamba2("mamba2-780m", 48, 1536)


def mamba2_1_3b() -> Model:
    return mamba2("mamba2-1.3b", 48, 2048)


def mamba2_2_7b() -> Model:
    return mamba2("mamba2-2.7b", 64, 2560)
