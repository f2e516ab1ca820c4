"""The outline of a model: its figures add up, folding loses nothing, and its table is printed as expected."""

import doctest
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megaloom.dsl import (
    MLP,
    Attention,
    CrossAttention,
    Dim,
    Embed,
    Layer,
    LayerNorm,
    Model,
    MoE,
    RMSNorm,
    SwiGLU,
    Unembed,
    UserError,
    Value,
    dot,
    flops,
    fn,
    graph,
    ids,
    model,
    params,
    repeat,
    residual,
    saved,
    weight,
)
from megaloom.dsl.catalog import examples, find
from megaloom.dsl.dims import NBYTES
from megaloom.dsl.facts.positions import longest
from megaloom.dsl.show import formatting
from megaloom.dsl.show.figures import Figures, total
from megaloom.dsl.show.items import Group, Item, Leaf
from megaloom.dsl.show.outline import Outline, outline
from megaloom.dsl.show.table import report
from megaloom.dsl.show.tree import (
    ASCII,
    guides_for,
    title,
    tree_rows,
)
from megaloom.runtime.cli.main import main
from tests.support.models.examples import example
from tests.support.paths import TESTS

GOLDEN = TESTS / "golden"
D = Dim("embed", 32)
VOCAB = Dim("vocab", 64)
BLOCKS: dict[str, Layer] = {
    "a": residual(RMSNorm(), Attention(heads=4)),
    "f": residual(RMSNorm(), SwiGLU(64)),
    "m": residual(RMSNorm(), MoE(SwiGLU(16), experts=4, top_k=2)),
    "n": RMSNorm(),
}


def encoder_decoder() -> Model:
    """Return a model of two columns: the decoder's cross-attention reads the output of the encoder."""
    wte = weight("wte", VOCAB, D)
    reads = residual(LayerNorm(), Attention(heads=4, causal=False)) >> residual(LayerNorm(), MLP(64))
    writes = (
        residual(LayerNorm(), Attention(heads=4))
        >> residual(LayerNorm(), CrossAttention(heads=4))
        >> residual(LayerNorm(), MLP(64))
    )
    memory = ids("source_tokens", Dim("source")) >> Embed(wte) >> repeat(3, reads) >> LayerNorm()
    x = ids() >> Embed(wte) >> repeat(3, writes).given(memory=memory) >> LayerNorm()
    return model("encoder-decoder", x >> Unembed(wte))


def chained(*layers: Layer) -> Model:
    """Return a model of these layers between an embedding and its transpose."""
    wte = weight("wte", VOCAB, D)
    x = ids() >> Embed(wte)
    for layer in layers:
        x = x >> layer
    return model("chained", x >> Unembed(wte))


def small(m: Model, batch: int = 2, seq: int = 64) -> Outline:
    return outline(m, batch=batch, seq=seq)


def groups(items: Sequence[Item]) -> Iterator[Group]:
    for item in items:
        if isinstance(item, Group):
            yield item
            yield from groups(item.items)


def tree(items: Sequence[Item]) -> list[object]:
    """Return the items as nested lists: the names of layers, and a group as its title and its items."""
    return [title(i).partition("(")[0] if isinstance(i, Leaf) else (title(i), tree(i.items)) for i in items]


def printed(o: Outline, width: int | None = None) -> str:
    text = StringIO()
    Console(file=text, width=width or 1000, color_system=None).print(report(o, "bf16", width=width))
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mixtral-8x7b", "encoder-decoder"])
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    """The tables equal the golden files; --update rewrites these."""
    m = encoder_decoder() if name == "encoder-decoder" else find(name)[0]
    text = printed(outline(m, batch=1, seq=1024))
    path = GOLDEN / f"show_{name}.txt"
    if request.config.getoption("--update"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", [*sorted(examples()), "encoder-decoder"])
def test_the_figures_add_up(name: str) -> None:
    m = encoder_decoder() if name == "encoder-decoder" else example(name)
    o = small(m)
    exact, saved_tensors = flops(m, batch=2, seq=64), saved(graph(m).nodes, batch=2, seq=64)
    assert o.figures == Figures(
        params=params(m),
        forward=exact.forward,
        dgrad=exact.dgrad,
        wgrad=exact.wgrad,
        saved=sum(s.elements for s in saved_tensors),
        nbytes=sum(s.elements * NBYTES.get(s.dtype, 2) for s in saved_tensors),
    )
    for group in (g for column in o.columns for g in groups(column)):
        assert group.figures == total(item.figures for item in group.items) * group.times
    top = [line.figures for line in tree_rows(o) if line.depth == 0]
    assert total(top[:-1]) == top[-1] == o.figures


def test_repeats_are_folded_where_they_are_equal() -> None:
    a, f, m = BLOCKS["a"], BLOCKS["f"], BLOCKS["m"]
    o = small(chained(repeat(3, a >> f), repeat(58, a >> m), RMSNorm()))
    dense = ("repeat 3x", [("x +", ["RMSNorm", "Attention", "add"]), ("x +", ["RMSNorm", "SwiGLU", "add"])])
    sparse = ("repeat 58x", [("x +", ["RMSNorm", "Attention", "add"]), ("x +", ["RMSNorm", "MoE", "add"])])
    assert tree(o.columns[0]) == ["tokens", "Embed", dense, sparse, "RMSNorm", "Unembed"]


def test_alternating_patterns_are_folded_as_they_were_written_or_come_out() -> None:
    near = residual(RMSNorm(), Attention(heads=4, window=8))
    pair = small(chained(repeat(6, near >> BLOCKS["a"]))).columns[0][2]
    assert title(pair) == "repeat 6x"
    assert len(tree([pair])[0][1]) == 2  # type: ignore[index]
    apart = small(chained(*(repeat(1, BLOCKS["a"] if i % 6 == 5 else near) for i in range(14)))).columns[0]
    assert [title(i) for i in apart[2:-1]] == ["repeat 2x", "repeat 2x"]
    assert [title(i) for i in groups(apart[2:3])] == ["repeat 2x", "repeat 5x", "x +", "x +"]
    nested = small(chained(repeat(2, repeat(3, BLOCKS["a"]) >> BLOCKS["f"]))).columns[0][2:3]
    assert [title(i) for i in groups(nested)] == ["repeat 2x", "repeat 3x", "x +", "x +"]


@given(st.lists(st.sampled_from("afmn"), min_size=1, max_size=14))
@settings(max_examples=40)
def test_an_outline_unfolds_to_what_was_written(letters: list[str]) -> None:
    def unfolded(items: Sequence[Item]) -> Iterator[str]:
        for item in items:
            if isinstance(item, Leaf):
                yield "n" if isinstance(item.node.op, RMSNorm) else ""
            elif item.layer is None:
                yield from [*unfolded(item.items)] * item.times
            else:
                (inner,) = (i for i in item.items[1:] if isinstance(i, Leaf) and isinstance(i.node.op, Layer))
                yield {Attention: "a", SwiGLU: "f", MoE: "m"}[type(inner.node.op)]

    o = small(chained(*(BLOCKS[letter] for letter in letters)))
    (column,) = o.columns
    assert "".join(unfolded(column)) == "".join(letters)


@frozen
class Projected(Layer):
    """x through a table of one's own and one that was made outside."""

    table: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return dot(dot(x, self.table, "embed"), weight("back", Dim("ff", 16), D), "ff")


def test_a_weight_counts_once() -> None:
    """For the first that reads it; for none of several repeats, where it stands below."""
    table = weight("table", D, Dim("ff", 16))
    shared = small(chained(repeat(4, residual(Projected(table)))))
    cells = {line.title: line.cells for line in tree_rows(shared)}
    assert cells["Projected(table=table)"][1] == "512 + tied"
    assert cells["table, shared by repeats"][:2] == ("[embed=32 ff=16]", "512")
    assert (cells["Embed(table=wte)"][1], cells["Unembed(table=wte)"][1]) == ("2.05 k", "tied")
    outside = small(chained(Projected(table), repeat(4, residual(Projected(table)))))
    assert outside.shared == ()
    assert [line.cells[1] for line in tree_rows(outside) if "Projected" in line.title] == ["1.02 k", "512 + tied"]


def test_what_all_repeats_keep_counts_where_it_is_made() -> None:
    encoder, decoder = small(encoder_decoder(), batch=1, seq=64).columns
    memory = encoder[-1]
    assert memory.figures.saved == 2 * 64 * 32  # its own input, and what it gives to the decoder
    assert [g.times for g in groups(decoder) if g.layer is None] == [3]


def test_columns_and_what_is_read_from_afar() -> None:
    encoder, decoder = small(encoder_decoder()).columns
    assert (encoder[0].out, decoder[0].out) == ("source_tokens", "tokens")
    titles = [line.title for line in tree_rows(small(encoder_decoder()))]
    assert "LayerNorm() as layer_norm.6" in titles
    assert "CrossAttention(heads=4) reads layer_norm.6" in titles


@frozen
class Gated(Layer):
    """x + inner(x) * first, where `first` is what went into all of them."""

    inner: Layer
    transparent = True

    def body(self, x: Value, /, first: Value, **side: Value) -> Value:  # type: ignore[override]
        return x + fn("mul", x >> self.inner, first)


def test_a_layer_of_ones_own_is_looked_into() -> None:
    wte = weight("wte", VOCAB, D)
    x = ids() >> Embed(wte)
    y = x >> repeat(4, residual(RMSNorm(), SwiGLU(16)) >> Gated(RMSNorm())).given(first=x)
    o = small(model("own", y >> Unembed(wte), y))
    titles = [line.title for line in tree_rows(o)]
    assert "Gated" in titles
    assert "mul reads embed.0" in titles
    assert "add reads x" in titles
    assert o.figures.params == params(o.model)


def test_no_deeper_than_the_model() -> None:
    """A thousand blocks are no thousand calls."""
    o = small(chained(repeat(1000, BLOCKS["n"])))
    assert [title(i) for i in o.columns[0]] == ["tokens", "Embed(table=wte)", "repeat 1000x", "Unembed(table=wte)"]


def test_a_sequence_longer_than_the_positions() -> None:
    gpt2, _ = find("gpt2")
    assert longest(graph(gpt2)) == {"seq": 1024}
    assert longest(graph(find("llava-7b")[0])) == {}  # those of its image are no tokens
    assert "of 1,024 tokens, with 64 source tokens each" in printed(
        outline(encoder_decoder(), batch=1, seq=1024, source=64)
    )
    with pytest.raises(UserError, match="seq 2048 is longer than the 1024 learned positions of gpt2\nuse --seq"):
        outline(gpt2, batch=1, seq=2048)
    for size in ({"batch": 0, "seq": 8}, {"batch": 1, "seq": 0}, {"batch": 1, "seq": 8, "source": -1}):
        with pytest.raises(UserError, match="must be a whole number of at least 1"):
            outline(gpt2, **size)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_it_fits_a_terminal(width: int) -> None:
    for m in (encoder_decoder(), find("gpt2")[0], find("deepseek-v3")[0]):
        text = printed(small(m), width)
        assert max(map(len, text.splitlines())) <= width
        assert ("gives" in text) >= (width == 140)
        assert "parameters" in text and "bytes" in text


def test_guides_that_can_be_shown() -> None:
    assert guides_for("utf-8")[0] == "│  "
    assert guides_for("ascii") == guides_for("latin-1") == guides_for(None) == guides_for("no-such") == ASCII
    assert [line.guide + line.title for line in tree_rows(small(chained(BLOCKS["a"])), ASCII)][2:5] == [
        "x +",
        "|- RMSNorm()",
        "`- Attention(heads=4)",
    ]


def test_formatting() -> None:
    assert doctest.testmod(formatting).failed == 0
    assert formatting.format_count(999_499) == "999 k" and formatting.format_count(999_500) == "1.00 M"
    assert formatting.format_bytes((1 << 20) - 1) == "1.00 MiB"
    assert formatting.format_count(10**21) == "1000 E"
    assert formatting.declared(MoE(SwiGLU(64), experts=4, top_k=2)) == "MoE(expert=SwiGLU(ff=64), experts=4, top_k=2)"
    assert formatting.declared(Attention(heads=4, rope=1e6)) == "Attention(heads=4, rope=1000000)"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the output of `megaloom show`, run in this process and in an empty folder; for bad input, its stderr."""

    def run(*args: object, code: int = 0) -> str:
        monkeypatch.chdir(tmp_path)
        assert main(["show", *map(str, args)]) == code
        out, err = capsys.readouterr()
        assert err.startswith("megaloom: ") and "Traceback" not in err if code else err == ""
        return err if code else out

    return run


def test_the_command(command: Callable[..., str], tmp_path: Path) -> None:
    shown = command("gpt2", "--svg", "gpt2.svg", "--html", "gpt2.html")
    assert shown == (GOLDEN / "show_gpt2.txt").read_text() + "wrote gpt2.svg\nwrote gpt2.html\n"
    assert (tmp_path / "gpt2.svg").read_text().startswith("<svg ")
    assert (tmp_path / "gpt2.html").read_text().startswith("<!doctype html>")
    assert "activations in fp32" in command("t5-base", "--seq", 512, "--source", 128, "--precision", "fp32")
    assert "for 8 sequences of 512 tokens" in command("mamba2-130m", "--seq", 512, "--batch", 8)


BAD = {
    "unknown model": (("gpt5",), "no model 'gpt5'"),
    "no tokens": (("gpt2", "--seq", "0"), "seq must be a whole number of at least 1, got 0"),
    "fewer sequences than one": (("gpt2", "--batch", "-1"), "batch must be a whole number of at least 1, got -1"),
    "more tokens than positions": (
        ("gpt2", "--seq", "1025"),
        "than the 1024 learned positions of gpt2\nuse --seq 1024 or less",
    ),
    "a folder for a file": (("gpt2", "--svg", "."), "cannot write --svg '.': it is a folder"),
    "no such folder": (
        ("gpt2", "--html", "nowhere/a.html"),
        "cannot write --html 'nowhere/a.html': No such file or directory",
    ),
    "no such precision": (("gpt2", "--precision", "fp12"), "fp12"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_message(case: str, command: Callable[..., str]) -> None:
    args, message = BAD[case]
    assert message in command(*args, code=2)


def test_it_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from megaloom.runtime.cli.main import main; "
        "main(['show', 'llama3-8b', '--html', 'a.html']); print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True, cwd=tmp_path)
    assert shown.stdout.splitlines()[-1] == "False"
