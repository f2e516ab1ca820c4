"""Public names: each is documented, and tests/golden/surface.txt lists them, so that none changes unnoticed."""

import inspect
import re
from collections.abc import Iterator
from enum import EnumMeta
from functools import cached_property
from importlib import import_module
from types import ModuleType

import pytest

from megaloom import dsl, planner
from tests.support.paths import ROOT, TESTS

SURFACE = TESTS / "golden" / "surface.txt"
PACKAGES = (dsl, planner)
FOLDERS = ROOT


def modules(package: ModuleType) -> Iterator[ModuleType]:
    for path in sorted((FOLDERS / package.__name__.removeprefix("megaloom.")).glob("*.py")):
        yield package if path.stem == "__init__" else import_module(f"{package.__name__}.{path.stem}")


def members(it: type) -> dict[str, object]:
    """The public methods and properties that a class defines itself."""
    results = {name: inspect.getattr_static(it, name) for name in vars(it) if not name.startswith("_")}
    routines = (property, cached_property, classmethod, staticmethod)
    return {n: m for n, m in results.items() if isinstance(m, routines) or inspect.isfunction(m)}


# The golden file


def annotation(it: object) -> str:
    return it if isinstance(it, str) else getattr(it, "__name__", str(it))


def parameter(p: inspect.Parameter) -> str:
    text = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
    text += "" if p.annotation is p.empty else f": {annotation(p.annotation)}"
    return text if p.default is p.empty else f"{text} = {re.sub(' at 0x[0-9a-f]+', '', repr(p.default))}"


def signature(it: object) -> str:
    """(heads: int, *, causal: bool = True) -> Value, without self and where a layer was written."""
    own_signature = inspect.signature(it)
    parts, kind = [], None
    for p in own_signature.parameters.values():
        if p.name in ("self", "cls", "at"):
            continue
        if kind is p.POSITIONAL_ONLY and p.kind is not kind:
            parts.append("/")
        if p.kind is p.KEYWORD_ONLY and kind not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL):
            parts.append("*")
        parts.append(parameter(p))
        kind = p.kind
    gives = (
        ""
        if own_signature.return_annotation in (own_signature.empty, None, "None")
        else f" -> {annotation(own_signature.return_annotation)}"
    )
    return f"({', '.join(parts)}){gives}"


def described(name: str, it: object) -> Iterator[str]:
    if isinstance(it, EnumMeta):
        yield f"{name}: {', '.join(it.__members__)}"
    elif inspect.isclass(it):
        bases = ", ".join(b.__name__ for b in it.__bases__ if b is not object)
        built = signature(it.__init__) if inspect.isfunction(it.__init__) else ""  # else as Python's own class is made
        yield f"{name}{built}" + (f": {bases}" if bases else "")
    elif inspect.isroutine(it):
        yield f"{name}{signature(it)}"
    else:
        yield f"{name} = {it}"
    if inspect.isclass(it):
        for member, m in sorted(members(it).items()):
            if isinstance(m, (property, cached_property)):
                own_signature = inspect.signature(m.fget if isinstance(m, property) else m.func)
                yield f"    .{member}: {annotation(own_signature.return_annotation)}"
            else:
                yield f"    .{member}{signature(getattr(m, '__func__', m))}"


def surface() -> str:
    lines = []
    for package in PACKAGES:
        lines.append(f"{package.__name__}\n")
        for name in sorted(package.__all__):
            lines += [f"{line}\n" for line in described(name, getattr(package, name))]
        lines.append("\n")
    return "".join(lines)


def test_the_surface_is_what_it_was(request: pytest.FixtureRequest) -> None:
    """New, removed and changed names and parameters differ from the golden file; --update rewrites it."""
    if request.config.getoption("--update"):
        SURFACE.write_text(surface())
    assert surface() == SURFACE.read_text()


# Descriptions


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_every_public_name_is_described(package: ModuleType) -> None:
    """Also what is public in a module alone, and each method and property; one that overrides is described above it."""
    missing = []
    for module in modules(package):
        missing += [] if module.__doc__ else [module.__name__]
        for name, it in vars(module).items():
            own = getattr(it, "__module__", None) == module.__name__
            if name.startswith("_") or not own or not (inspect.isclass(it) or inspect.isfunction(it)):
                continue
            missing += [] if vars(it).get("__doc__", it.__doc__) else [f"{module.__name__}.{name}"]
            if inspect.isclass(it):
                undescribed = [m for m in members(it) if not inspect.getdoc(getattr(it, m))]
                missing += [f"{module.__name__}.{name}.{m}" for m in undescribed]
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_a_description_begins_with_a_sentence(package: ModuleType) -> None:
    for name in package.__all__:
        it = getattr(package, name)
        if inspect.isclass(it) or inspect.isroutine(it):
            first = inspect.getdoc(it).split("\n\n")[0]
            assert re.search(r"[.?…:]", first), name
            assert not re.match(rf"{name}\(", first), f"{name} is described by attrs alone"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_names_are_nouns_or_verbs(package: ModuleType) -> None:
    """CamelCase for classes, lower case for functions, upper case for constants."""
    assert len(package.__all__) == len(set(package.__all__))
    for name in package.__all__:
        it = getattr(package, name)
        want = r"[A-Z]\w*" if inspect.isclass(it) else r"[a-z_]+" if inspect.isroutine(it) else r"[A-Z_]+"
        assert re.fullmatch(want, name), name


def test_mypy_is_strict_where_nothing_is_untyped() -> None:
    """In dsl, planner and examples; the runtime speaks to libraries that have no types."""
    text = (FOLDERS / "pyproject.toml").read_text()
    settings = re.search(r"\[tool\.mypy\]\n(.*?)\n\n", text, re.DOTALL)[1]
    assert "strict = true" in settings
    assert all(f'"megaloom.{name}"' in settings for name in ("dsl", "planner", "examples"))
    loosened = re.findall(r"^module = (.*?)(?:  #.*)?$", text, re.MULTILINE)
    assert not [m for m in loosened if re.search(r"megaloom\.(dsl|planner|examples)", m)]
