"""Static evaluation of functions that build a configuration: straight-line Python, without running anything.

Names of modules that are not followed are objects of which the arguments are the fields. Where a condition is not
known, what its branches assign is not known either.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy

from attrs import define, field

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.words import Origin, Unknown

from .builtin_calls import computed_call
from .call_check import check_call
from .modules import ModuleFiles, PythonModule, imported_names
from .operators import SIZES, operated
from .values import Foreign, Function, Instance, Known, Lacking, Value, item_key, truth

MOST_STATEMENTS = 20_000
DEEPEST_FUNCTION = 40
Scope = dict[str, Value]
LIST_METHODS = ("append", "extend")


class _ReturnError(Exception):
    def __init__(self, value: Value) -> None:
        super().__init__()
        self.value = value


@define
class RecipeEvaluator:
    """Evaluates functions. `follows` says of a module's name whether its file is read.

    environment: variables that `os.environ` has. calls: calls of what is not followed, in their order.
    """

    files: ModuleFiles
    follows: Callable[[str], bool]
    environment: Mapping[str, str] = field(factory=dict)
    calls: list[Instance] = field(factory=list)
    count: int = 0
    depth: int = 0

    def call(self, function: Function, arguments: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
        """Return what a function returns."""
        self.depth += 1
        module = function.module
        assert isinstance(module, PythonModule)
        if self.depth > DEEPEST_FUNCTION:
            raise UserError(
                f"{module.path}:{function.node.lineno}: functions call each other too deeply to be evaluated"
            )
        try:
            self.body(function.node.body, self._bound(function, arguments, keywords), module)
        except _ReturnError as left:
            return left.value
        finally:
            self.depth -= 1
        return Known(None, module.origin(function.node))

    def _bound(self, function: Function, arguments: Sequence[Value], keywords: Mapping[str, Value]) -> Scope:
        node, module = function.node, function.module
        assert isinstance(module, PythonModule)
        check_call(node, arguments, keywords, module.origin(node))
        names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        scope: Scope = dict(zip(names, arguments, strict=False))
        defaults = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
        defaults |= {
            one.arg: value for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value
        }
        rest = keywords.get("**")  # a dict that is not known, which may hold any of them
        scope |= {name: rest or self.value(one, {}, module) for name, one in defaults.items() if name not in scope}
        scope |= keywords
        for name in (*names, *(one.arg for one in node.args.kwonlyargs)):
            scope.setdefault(name, Lacking(Unknown(name, "variable", module.origin(node))))
        if node.args.kwarg:
            known = {*names, *(one.arg for one in node.args.kwonlyargs)}
            others = {name: value for name, value in keywords.items() if name not in known}
            scope[node.args.kwarg.arg] = Instance("dict", module.origin(node), others)
        return scope

    def body(self, statements: Iterable[ast.stmt], scope: Scope, module: PythonModule) -> None:
        """Evaluate statements: change the scope, and the objects in it."""
        for node in statements:
            self.count += 1
            if self.count > MOST_STATEMENTS:
                raise UserError(f"{module.path}: the file has loops that are too long to be evaluated")
            self._statement(node, scope, module)

    def _statement(self, node: ast.stmt, scope: Scope, module: PythonModule) -> None:
        if isinstance(node, ast.Return):
            raise _ReturnError(
                self.value(node.value, scope, module) if node.value else Known(None, module.origin(node))
            )
        if isinstance(node, ast.Assign):
            value = self.value(node.value, scope, module)
            for target in node.targets:
                self._assign(target, value, scope, module)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self.value(node.value, scope, module), scope, module)
        elif isinstance(node, ast.AugAssign):
            both = ast.BinOp(self._loaded(node.target), node.op, node.value, lineno=node.lineno, col_offset=0)
            self._assign(node.target, self.value(both, scope, module), scope, module)
        elif isinstance(node, ast.Expr):
            self.value(node.value, scope, module)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for name, (source, own) in imported_names(node, module.package).items():
                scope[name] = self._imported(source, own, module.origin(node))
        elif isinstance(node, ast.If):
            self._if(node, scope, module)
        elif isinstance(node, ast.For):
            self._for(node, scope, module)
        elif isinstance(node, ast.While | ast.Match):
            self._unknown(node, _of_line(node, module), scope, module)
        elif isinstance(node, ast.With | ast.Try):
            self.body(node.body, scope, module)
        elif isinstance(node, ast.FunctionDef):
            scope[node.name] = Function(node, module)

    @staticmethod
    def _loaded(target: ast.expr) -> ast.expr:
        loaded = deepcopy(target)
        loaded.ctx = ast.Load()  # type: ignore[attr-defined]
        return loaded

    def _assign(self, target: ast.expr, value: Value, scope: Scope, module: PythonModule) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, scope, module)
            if isinstance(owner, Foreign):
                owner = self._default(target.value, owner, scope, module)
            if isinstance(owner, Instance):
                owner.fields[target.attr] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for position, one in enumerate(target.elts):
                item = value[position] if isinstance(value, list) and position < len(value) else None
                self._assign(one, item or Instance("?", module.origin(target)), scope, module)
        elif isinstance(target, ast.Subscript):
            owner, key = self.value(target.value, scope, module), self.value(target.slice, scope, module)
            if isinstance(owner, Instance) and item_key(key):
                owner.fields[item_key(key)] = value

    def _default(self, target: ast.expr, name: Foreign, scope: Scope, module: PythonModule) -> Value:
        """Return the object that a field has by default, made where a statement changes it; a module as it is."""
        owner = self.value(target.value, scope, module) if isinstance(target, ast.Attribute) else name
        if not isinstance(owner, Instance) or not isinstance(target, ast.Attribute):
            return name
        return owner.fields.setdefault(target.attr, Instance(name.name, name.origin))

    def _if(self, node: ast.If, scope: Scope, module: PythonModule) -> None:
        condition = self.value(node.test, scope, module)
        known = truth(condition)
        if known is not None:
            self.body(node.body if known else node.orelse, scope, module)
            return
        unknown = Unknown("?", "condition", module.origin(node))
        unknown = condition.unknown if isinstance(condition, Lacking) else unknown
        self._unknown(node, unknown, scope, module)

    def _unknown(self, node: ast.stmt, unknown: Unknown, scope: Scope, module: PythonModule) -> None:
        """Make unknown what a statement may assign. Raise UserError for one that may return a configuration."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Return):
                what = f"which configuration is returned depends on {unknown.kind} {unknown.name}"
                raise UserError(f"{module.origin(node)}: {what}, which is not known")
            targets = inner.targets if isinstance(inner, ast.Assign) else ()
            for target in (*targets, *([inner.target] if isinstance(inner, ast.AugAssign | ast.AnnAssign) else ())):
                self._assign(target, Lacking(unknown), scope, module)

    def _for(self, node: ast.For, scope: Scope, module: PythonModule) -> None:
        items = self.value(node.iter, scope, module)
        if not isinstance(items, list):
            self._unknown(node, items.unknown if isinstance(items, Lacking) else _of_line(node, module), scope, module)
            return
        for item in items:
            self._assign(node.target, item, scope, module)
            self.body(node.body, scope, module)

    def value(self, node: ast.expr, scope: Scope, module: PythonModule) -> Value:
        """Return the value of an expression."""
        origin = module.origin(node)
        if isinstance(node, ast.Constant):
            return Known(node.value, origin)
        if isinstance(node, ast.Name):
            return self.named(node.id, module, origin, scope)
        if isinstance(node, ast.Attribute):
            return self._attribute(self.value(node.value, scope, module), node.attr, origin)
        if isinstance(node, ast.Call):
            return self._called(node, scope, module)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(one, scope, module) for one in node.elts if not isinstance(one, ast.Starred)]
        if isinstance(node, ast.Dict):
            return self._dict(node, scope, module)
        if isinstance(node, ast.IfExp):
            known = truth(self.value(node.test, scope, module))
            if known is not None:
                return self.value(node.body if known else node.orelse, scope, module)
        if isinstance(node, ast.JoinedStr):
            return self._text(node, scope, module)
        if isinstance(node, ast.ListComp) and len(node.generators) == 1 and not node.generators[0].ifs:
            return self._listed(node, scope, module)
        if isinstance(node, ast.Subscript):
            owner, key = self.value(node.value, scope, module), self.value(node.slice, scope, module)
            if isinstance(owner, Foreign) and owner.name == "os.environ":
                got = Instance("os.environ.get", origin, arguments=[key])
                return computed_call(got, self.environment) or self._item(owner, key, origin)
            return self._item(owner, key, origin)
        return self._operated(node, scope, module)

    def _operated(self, node: ast.expr, scope: Scope, module: PythonModule) -> Value:
        origin = module.origin(node)
        lacking = Lacking(Unknown(f"line {node.lineno}", "condition", origin))
        if isinstance(node, ast.BoolOp):
            values = [self.value(one, scope, module) for one in node.values]
            decisive = isinstance(node.op, ast.Or)
            found = next((one for one in values if truth(one) is decisive), None)
            return found or (values[-1] if all(truth(one) is not None for one in values) else lacking)
        if isinstance(node, ast.UnaryOp):
            operand = self.value(node.operand, scope, module)
            if isinstance(node.op, ast.Not):
                known = truth(operand)
                return lacking if known is None else Known(not known, origin)
            if isinstance(operand, Known) and isinstance(operand.value, SIZES):
                return Known(-operand.value if isinstance(node.op, ast.USub) else operand.value, operand.origin)
        if isinstance(node, ast.BinOp):
            return self._computed(node.op, node.left, node.right, scope, module) or lacking
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._computed(node.ops[0], node.left, node.comparators[0], scope, module) or lacking
        return lacking

    def _computed(
        self, kind: ast.AST, first: ast.expr, second: ast.expr, scope: Scope, module: PythonModule
    ) -> Value | None:
        left, right = self.value(first, scope, module), self.value(second, scope, module)
        return operated(kind, left, right, module.origin(first))

    def _listed(self, node: ast.ListComp, scope: Scope, module: PythonModule) -> Value:
        """Return the items of a list comprehension with one `for`."""
        items, inner, out = self.value(node.generators[0].iter, scope, module), dict(scope), list[Value]()
        if not isinstance(items, list):
            return Lacking(Unknown(f"line {node.lineno}", "condition", module.origin(node)))
        for item in items:
            self._assign(node.generators[0].target, item, inner, module)
            out.append(self.value(node.elt, inner, module))
        return out

    @staticmethod
    def _item(owner: Value, key: Value, origin: Origin) -> Value:
        """Return an item of a list or of a dict."""
        at = key.value if isinstance(key, Known) else None
        if isinstance(owner, list) and isinstance(at, int) and -len(owner) <= at < len(owner):
            return owner[at]
        found = owner.fields.get(item_key(key)) if isinstance(owner, Instance) else None
        return found or Lacking(Unknown(f"line {origin.line_number}", "condition", origin))

    def _text(self, node: ast.JoinedStr, scope: Scope, module: PythonModule) -> Value:
        text = ""
        for part in node.values:
            value = self.value(part.value if isinstance(part, ast.FormattedValue) else part, scope, module)
            if not isinstance(value, Known):
                return (
                    value if isinstance(value, Lacking) else Lacking(Unknown("text", "condition", module.origin(node)))
                )
            text += str(value.value)
        return Known(text, module.origin(node))

    def _dict(self, node: ast.Dict, scope: Scope, module: PythonModule) -> Value:
        out = Instance("dict", module.origin(node))
        for key, value in zip(node.keys, node.values, strict=True):
            one = self.value(value, scope, module)
            if key is None:
                out.fields |= one.fields if isinstance(one, Instance) else {}
            elif name := item_key(self.value(key, scope, module)):
                out.fields[name] = one
        return out

    def named(self, name: str, module: PythonModule, origin: Origin, scope: Scope | None = None) -> Value:
        """Return what a name stands for in a module, or in a function's scope."""
        if scope and name in scope:
            return scope[name]
        if name in module.functions:
            return Function(module.functions[name], module)
        if name in module.constants:
            scope_of_module: Scope = {}
            return self.value(module.constants[name], scope_of_module, module)
        if name in module.imports:
            return self._imported(*module.imports[name], origin)
        return Foreign(name, origin)

    def _imported(self, source: str, name: str, origin: Origin) -> Value:
        other = self.files.module(source) if name and self.follows(source) else None
        itself = other is not None and other.imports.get(name) == (source, name)  # a package that imports its modules
        if other and not itself and name in (*other.functions, *other.constants, *other.imports):
            return self.named(name, other, origin)
        return Foreign(".".join(filter(None, (source, name))), origin)

    def _attribute(self, owner: Value, name: str, origin: Origin) -> Value:
        if isinstance(owner, Instance):
            return owner.fields.get(name) or Foreign(f"{owner.name}.{name}", origin)
        if isinstance(owner, Foreign):
            inner = self.files.module(owner.name) if self.follows(owner.name) else None
            return self.named(name, inner, origin) if inner else Foreign(f"{owner.name}.{name}", origin)
        return owner if isinstance(owner, Lacking) else Foreign(name, origin)

    def _called(self, node: ast.Call, scope: Scope, module: PythonModule) -> Value:
        arguments = [self.value(one, scope, module) for one in node.args if not isinstance(one, ast.Starred)]
        keywords: dict[str, Value] = {}
        for one in node.keywords:
            value = self.value(one.value, scope, module)
            if one.arg is not None:
                keywords[one.arg] = value
            elif isinstance(value, Instance) and value.name == "dict":
                keywords |= value.fields
            else:
                keywords["**"] = value if isinstance(value, Lacking) else Lacking(_of_line(one.value, module))
        owner = self.value(node.func.value, scope, module) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, list) and isinstance(node.func, ast.Attribute) and node.func.attr in LIST_METHODS:
            added = arguments[0] if arguments and node.func.attr == "extend" else arguments
            owner.extend(added if isinstance(added, list) else [])
            return Known(None, module.origin(node))
        callee = self.value(node.func, scope, module)
        if isinstance(callee, Function):
            return self.call(callee, arguments, keywords)
        if isinstance(callee, Lacking):
            return callee
        name = callee.name if isinstance(callee, Foreign | Instance) else "?"
        made = Instance(name, module.origin(node), keywords, arguments, owner if isinstance(owner, Instance) else None)
        if (computed := computed_call(made, self.environment)) is not None:
            return computed
        self.calls.append(made)
        return made


def _of_line(node: ast.stmt | ast.expr, module: PythonModule) -> Unknown:
    """Return the unknown for a statement or an expression that is not evaluated."""
    return Unknown(f"line {node.lineno}", "condition", module.origin(node))
