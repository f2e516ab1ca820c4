"""The drawing of a model: all its layers are on it, nothing on anything else; and the page around it."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from attrs import frozen

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Layer,
    Linear,
    Model,
    RMSNorm,
    SwiGLU,
    Unembed,
    UserError,
    Value,
    fn,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.catalog import find
from megaloom.dsl.show.arrangement import CHARACTER_WIDTH, operator_sign, text_lines
from megaloom.dsl.show.html import page, save_files
from megaloom.dsl.show.outline import Outline, leaves, outline
from megaloom.dsl.show.svg import svg
from tests.support.paths import TEST_MODELS

SVG = "{http://www.w3.org/2000/svg}"
MODELS = TEST_MODELS / "small.py"
Box = tuple[float, float, float, float]  # left, top, right, bottom
Point = tuple[float, float]


def two_heads() -> Model:
    """Two outputs of one trunk, the second through a block more: a column that begins in the middle of another."""
    wte = weight("wte", Dim("vocab", 64), Dim("embed", 32))
    block = residual(RMSNorm(), Attention(heads=4)) >> residual(RMSNorm(), SwiGLU(64))
    trunk = ids() >> Embed(wte) >> repeat(3, block)
    return model("two-heads", *(x >> RMSNorm() >> Unembed(wte) for x in (trunk, trunk >> block)))


@frozen
class Both(Layer):
    """x + first + second: two side inputs."""

    def body(self, x: Value, /, first: Value, second: Value, **side: Value) -> Value:  # type: ignore[override]
        return fn("add", x, first, second) * weight("scale", x["embed"])


def three_columns() -> Model:
    """Two things that a third reads: what comes from the first passes by the second."""
    d = Dim("embed", 32)
    first, second, x = (ids(name) >> Embed(weight(f"{name}_table", Dim("vocab", 64), d)) for name in "abc")
    y = x >> repeat(2, residual(RMSNorm(), Both())).given(first=first >> RMSNorm(), second=second)
    return model("three-columns", y >> Unembed(weight("head", Dim("vocab", 64), d)))


def learned_queries() -> Model:
    """Return a model whose first layer reads a weight, and one of whose outputs is an input."""
    d = Dim("embed", 32)
    tokens, queries = ids(), weight("queries", Dim("places", 4), d)
    mixed = queries >> repeat(3, residual(RMSNorm(), SwiGLU(64))) >> Linear(d) >> Linear(d)
    return model("queries", mixed, tokens, weight("more", Dim("places", 4), d) >> RMSNorm())


OWN = {"queries": learned_queries, "two-heads": two_heads, "three-columns": three_columns}
NAMES = ["gpt2", "t5-base", "llava-7b", "bert-base", "deepseek-v3-mtp", "nemotron-h-8b", f"{MODELS}:tiny_parallel"]


@pytest.fixture(scope="module", params=[*NAMES, *OWN])
def drawn(request: pytest.FixtureRequest) -> tuple[Outline, ElementTree.Element]:
    m = OWN[request.param]() if request.param in OWN else find(request.param)[0]
    o = outline(m, batch=1, seq=32)
    return o, ElementTree.fromstring(svg(o))


def number(e: ElementTree.Element, *names: str) -> tuple[float, ...]:
    return tuple(float(e.attrib[name]) for name in names)


def rectangles(root: ElementTree.Element, kind: str) -> list[Box]:
    """The boxes of a kind, but for those of the legend."""
    out = []
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = number(rect, "x", "y", "width", "height") if rect.get("class") == kind else (0, 0, 0, 0)
        if w > 16:
            out.append((x, y, x + w, y + h))
    return out


def circles(root: ElementTree.Element) -> list[Box]:
    results = [number(c, "cx", "cy", "r") for c in root.iter(f"{SVG}circle") if c.get("class") == "sign"]
    return [(x - r, y - r, x + r, y + r) for x, y, r in results]


def lines(root: ElementTree.Element) -> Iterator[list[Point]]:
    """The corners of each line, those that are rounded included."""
    for path in root.iter(f"{SVG}path"):
        if path.get("class") == "line":
            numbers = [float(n) for n in re.findall(r"-?[\d.]+(?:e-?\d+)?", path.attrib["d"])]
            yield list(zip(numbers[::2], numbers[1::2], strict=True))


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def within(a: Box, b: Box) -> bool:
    return b[0] <= a[0] and b[1] <= a[1] and a[2] <= b[2] and a[3] <= b[3]


def test_every_layer_is_on_it(drawn: tuple[Outline, ElementTree.Element]) -> None:
    o, root = drawn
    texts = [
        tuple((t.get("class"), t.text) for t in g.iter(f"{SVG}text"))
        for g in root.iter(f"{SVG}g")
        if g.find(f"{SVG}rect[@class='box']") is not None
    ]
    lines = [text_lines(leaf) for column in o.columns for leaf in leaves(column) if not operator_sign(leaf)]
    assert [t for t in texts if len(t) > 1] == lines
    signs = [leaf for column in o.columns for leaf in leaves(column) if operator_sign(leaf)]
    assert len(circles(root)) == len(signs)
    frames = [
        g.findtext(f"{SVG}text") for g in root.iter(f"{SVG}g") if g.find(f"{SVG}rect[@class='frame']") is not None
    ]
    assert all(re.fullmatch(r"\d+×|block|Parallel", name or "") for name in frames)


def test_nothing_is_on_anything_else(drawn: tuple[Outline, ElementTree.Element]) -> None:
    _, root = drawn
    boxes, frames = [*rectangles(root, "box"), *circles(root)], rectangles(root, "frame")
    assert not any(overlap(a, b) for a, b in combinations(boxes, 2))
    assert all(within(b, f) or not overlap(b, f) for b in boxes for f in frames)
    assert all(within(a, b) or within(b, a) or not overlap(a, b) for a, b in combinations(frames, 2))
    _, _, width, height = (float(n) for n in root.attrib["viewBox"].split())
    assert all(within(b, (0, 0, width, height)) for b in [*boxes, *frames])


def test_lines_pass_no_box(drawn: tuple[Outline, ElementTree.Element]) -> None:
    _, root = drawn
    boxes = [*rectangles(root, "box"), *circles(root)]
    _, _, width, height = (float(n) for n in root.attrib["viewBox"].split())
    for line in lines(root):
        for (ax, ay), (bx, by) in pairwise(line):
            piece = min(ax, bx) - 0.5, min(ay, by) - 0.5, max(ax, bx) + 0.5, max(ay, by) + 0.5
            assert within(piece, (0, 0, width, height))
            inner = [(x0 + 1, y0 + 1, x1 - 1, y1 - 1) for x0, y0, x1, y1 in boxes]
            assert not any(overlap(piece, box) for box in inner)


def test_each_layer_is_reached_by_as_many_lines_as_it_reads(drawn: tuple[Outline, ElementTree.Element]) -> None:
    """Each value that it reads ends in a tip at its box, all of them apart."""
    o, root = drawn
    boxes = {}
    for g in root.iter(f"{SVG}g"):
        rect, circle, hover = g.find(f"{SVG}rect"), g.find(f"{SVG}circle"), g.findtext(f"{SVG}title")
        if hover and rect is not None and rect.get("class") == "box":
            x, y, w, h = number(rect, "x", "y", "width", "height")
            boxes[hover.partition(":")[0]] = (x, y, x + w, y + h)
        elif hover and circle is not None:
            x, y, r = number(circle, "cx", "cy", "r")
            boxes[hover.partition(":")[0]] = (x - r, y - r, x + r, y + r)
    tips = {line[-1] for line in lines(root)}
    for leaf in (leaf for column in o.columns for leaf in leaves(column)):
        x0, y0, x1, y1 = boxes[leaf.out]
        assert len([1 for x, y in tips if x0 <= x <= x1 and y0 <= y < y1]) == len(leaf.inputs), leaf.out


def test_the_text_fits_its_box(drawn: tuple[Outline, ElementTree.Element]) -> None:
    o, root = drawn
    for g in root.iter(f"{SVG}g"):
        rect = g.find(f"{SVG}rect[@class='box']")
        for text in g.iter(f"{SVG}text") if rect is not None else ():
            if kind := text.get("class"):
                assert CHARACTER_WIDTH[kind] * len(text.text or "") < float(rect.attrib["width"])
                x, y, w, h = number(rect, "x", "y", "width", "height")
                assert x < float(text.attrib["x"]) < x + w and y < float(text.attrib["y"]) < y + h
    assert o.model.name in [t.text for t in root.iter(f"{SVG}text")]


class Parsed(HTMLParser):
    """The tags that are open when the text ends, all that were seen, and the rows of the table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.loads: list[str] = []
        self.rows: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.loads += [name for name, value in attrs if name in ("src", "href", "xlink:href") and value]
        if tag == "tr":
            self.rows.append("")
        if tag not in ("meta", "rect", "circle", "path") or (tag, "d") in attrs:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "b"):
            self.rows[-1] += data + " "


def test_the_page_needs_nothing_else() -> None:
    o = outline(two_heads(), batch=1, seq=64)
    text = page(o, "bf16")
    parsed = Parsed(text)
    assert parsed.open == []
    assert parsed.loads == []
    assert not parsed.seen & {"script", "link", "img", "iframe", "object"}
    assert set(re.findall(r"https?:[^\"']*", text)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in text
    assert svg(o) in text
    assert [row.split()[0] for row in parsed.rows[1:6]] == ["tokens", "Embed(table=wte)", "repeat", "x", "RMSNorm()"]
    assert parsed.rows[-1].split()[0] == "total"


def test_what_is_written_is_escaped() -> None:
    wte = weight('<b>&"', Dim("vocab", 64), Dim("embed", 32))
    o = outline(model("a<b", ids("<i>") >> Embed(wte) >> Unembed(wte)), batch=1, seq=8)
    root = ElementTree.fromstring(svg(o))
    assert root.findtext(f"{SVG}title") == "a<b"
    assert {"<i>", 'table=<b>&"'} <= {t.text for t in root.iter(f"{SVG}text")}
    assert "<b>&" not in page(o, "bf16") and "a<b" not in page(o, "bf16")


def test_files(tmp_path: Path) -> None:
    o = outline(two_heads(), batch=1, seq=64)
    save_files(o, "bf16", tmp_path / "a.svg", tmp_path / "a.html")
    assert (tmp_path / "a.svg").read_text() == svg(o)
    assert (tmp_path / "a.html").read_text() == page(o, "bf16")
    with pytest.raises(UserError, match=r"cannot write .*: Is a directory\ngive a file in a directory that exists"):
        save_files(o, "bf16", tmp_path, None)
