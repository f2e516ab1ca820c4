"""No function has more than seven parameters, but those in Python whose keyword options are their interface."""

import ast

from tests.support.paths import ROOT

FOLDERS = ("dsl", "planner", "runtime", "benchmarks")  # the parameters of an example are the settings of its model
MOST = 7
EXCEPTIONS = {
    "planner/search/search.py plan": "in Python: what `plan` takes on the command line, by keyword",
    "runtime/generation/generate.py generate": "in Python: what `megaloom generate` takes, by keyword",
    "runtime/training/evaluation.py evaluate_run": "in Python: what `megaloom evaluate` takes, by keyword",
    "planner/cost/kernels.py kernel_seconds": "the settings of one kernel, innermost in a search",
    "planner/cost/kernels.py product_efficiency": "the numbers of one matrix product, innermost in a search",
    "runtime/megatron/kernels.py __init__": "the signature is megatron-core's",
}


def parameters(function: ast.FunctionDef) -> list[str]:
    """The parameters of a function, without self and cls."""
    a = function.args
    names = [x.arg for x in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if x]
    return names[names[:1] in (["self"], ["cls"]) :]


def test_no_function_has_more_than_seven_parameters() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    functions = [(p, n) for p in paths for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.FunctionDef)]
    long = {f"{p.relative_to(ROOT)} {f.name}" for p, f in functions if len(parameters(f)) > MOST}
    assert long <= EXCEPTIONS.keys(), "group some of them in a frozen value"


def test_the_public_exceptions_take_their_options_by_keyword() -> None:
    for name in (name for name, reason in EXCEPTIONS.items() if reason.startswith("in Python")):
        path, function = name.split()
        (tree,) = (n for n in ast.parse((ROOT / path).read_text()).body if getattr(n, "name", "") == function)
        assert isinstance(tree, ast.FunctionDef)
        assert len(tree.args.args) <= 3
