"""Writes Python modules of plain arithmetic as JavaScript: functions, dataclasses, generators.

What a module takes from another is taken from its translation, or else from `stubs`. Values keep
their meaning by the functions of `docs/planner/runtime.js`, which are called `py` here: there a list
or a tuple is an array, a dictionary a `Map`. Syntax that is not translated raises `NotImplementedError`.
"""

import ast
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["translated"]

BUILTINS = frozenset(
    [
        "abs",
        "all",
        "any",
        "bool",
        "dict",
        "enumerate",
        "filter",
        "float",
        "frozenset",
        "getattr",
        "hasattr",
        "int",
        "isinstance",
        "len",
        "list",
        "map",
        "max",
        "min",
        "next",
        "range",
        "reversed",
        "round",
        "set",
        "sorted",
        "str",
        "sum",
        "tuple",
        "type",
        "zip",
        "iter",
        "id",
        "divmod",
    ]
)
METHODS = frozenset(  # of lists, sets, dictionaries, strings and numbers
    [
        "append",
        "add",
        "clear",
        "copy",
        "count",
        "discard",
        "difference",
        "extend",
        "get",
        "index",
        "insert",
        "intersection",
        "items",
        "keys",
        "pop",
        "popleft",
        "remove",
        "rpartition",
        "partition",
        "setdefault",
        "subtract",
        "union",
        "update",
        "values",
        "bit_length",
        "appendleft",
        "issuperset",
        "issubset",
        "isdisjoint",
        "join",
        "rstrip",
        "sort",
    ]
)
BINARY = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv",
    ast.Mod: "mod", ast.BitOr: "or_", ast.BitAnd: "and_", ast.LShift: "shl", ast.RShift: "shr",
    ast.Pow: "pow",
}  # fmt: skip
COMPARED = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
    ast.In: "has", ast.NotIn: "hasnot", ast.Is: "is", ast.IsNot: "isnot",
}  # fmt: skip
RESERVED = frozenset(
    [
        "new",
        "delete",
        "default",
        "function",
        "var",
        "let",
        "const",
        "this",
        "super",
        "switch",
        "case",
        "with",
    ]
)


def translated(
    modules: Sequence[Path],
    root: Path,
    left_out: Collection[str],
    names: Mapping[str, Collection[str]],
) -> str:
    """Return modules, each after those that it imports, as one JavaScript text.

    Args:
        modules: their files.
        root: the folder that their names begin in.
        left_out: definitions that are taken from `stubs` instead, as `name` or `Class.method`.
        names: of some modules, by their dotted names, the only definitions that are wanted.
    """
    texts = []
    exported: dict[str, set[str]] = {}
    trees = {}
    for file in modules:
        dotted = ".".join(file.relative_to(root).with_suffix("").parts)
        trees[dotted] = ast.parse(file.read_text(encoding="utf-8"))
    classes = {
        node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    }
    methods = {
        inner.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for inner in node.body
        if isinstance(inner, ast.FunctionDef)
        and not _decorated(inner, "property", "cached_property")
    }
    for dotted, tree in trees.items():
        module = _Module(dotted, tree, exported, classes, methods, left_out, names.get(dotted))
        texts.append(module.text())
        exported[dotted] = module.defined
    return "\n".join(texts)


def _decorated(node: ast.FunctionDef | ast.ClassDef, *names: str) -> bool:
    return any(_name_of(decorator) in names for decorator in node.decorator_list)


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _safe(name: str) -> str:
    return f"{name}_" if name in RESERVED else name


def _has_yield(node: ast.AST) -> bool:
    """Whether a function is a generator by itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Yield | ast.YieldFrom) or _has_yield(child):
            return True
    return False


def _assigned(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements assign in their function."""
    names: set[str] = set()

    def look(node: ast.AST, *, inside: bool) -> None:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
            return
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            inside = True
        if isinstance(node, ast.NamedExpr):
            names.add(node.target.id)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and not inside:
            names.add(node.id)
        if isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        for child in ast.iter_child_nodes(node):
            look(child, inside=inside)

    for statement in body:
        look(statement, inside=False)
    return names


class _Module:
    """One module on its way to JavaScript."""

    def __init__(
        self,
        dotted: str,
        tree: ast.Module,
        exported: Mapping[str, set[str]],
        classes: Collection[str],
        methods: Collection[str],
        left_out: Collection[str],
        wanted: Collection[str] | None,
    ) -> None:
        self.dotted = dotted
        self.tree = tree
        self.exported = exported
        self.classes = classes
        self.methods = methods
        self.left_out = left_out
        self.wanted = wanted
        self.defined: set[str] = set()
        self.scopes: list[set[str]] = []
        self.count = 0

    def text(self) -> str:
        """Return the module as a constant with what it defines."""
        lines = [f"const {self.variable(self.dotted)} = (() => {{"]
        for node in self.tree.body:
            lines += self.top(node)
        lines.append(f"return {{{', '.join(sorted(self.defined))}}};")
        lines.append("})();")
        return "\n".join(lines)

    @staticmethod
    def variable(dotted: str) -> str:
        return dotted.replace(".", "_")

    def source(self, dotted: str, name: str) -> str:
        """Return the constant that a module's name is taken from, or that of a package's module."""
        for module, names in self.exported.items():
            if name in names and (module == dotted or module.startswith(f"{dotted}.")):
                return self.variable(module)
        return "stubs"

    def top(self, node: ast.stmt) -> Iterator[str]:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                if name in BUILTINS or node.module in ("__future__", "typing", "collections.abc"):
                    continue
                yield f"const {_safe(name)} = {self.source(node.module or '', alias.name)}.{alias.name};"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                yield f"const {name} = stubs.{name};"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            if self.wanted is not None and node.name not in self.wanted:
                return
            self.defined.add(node.name)
            if node.name in self.left_out:
                yield f"const {node.name} = stubs.{node.name};"
            elif isinstance(node, ast.FunctionDef):
                yield from self.function(node)
            else:
                yield from self.class_(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if not isinstance(target, ast.Name) or node.value is None or target.id == "__all__":
                return
            if self.wanted is not None and target.id not in self.wanted:
                return
            self.defined.add(target.id)
            value = f"stubs.{target.id}" if target.id in self.left_out else self.value(node.value)
            yield f"const {_safe(target.id)} = {value};"

    # ---- definitions

    def parameters(
        self, node: ast.FunctionDef | ast.Lambda, *, method: bool
    ) -> tuple[str, list[str]]:
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
        defaults += arguments.defaults
        pairs = list(zip(positional, defaults, strict=True))
        pairs = pairs[1:] if method else pairs
        pairs += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
        written = [
            _safe(argument.arg) + ("" if default is None else f" = {self.value(default)}")
            for argument, default in pairs
        ]
        names = [argument.arg for argument, _ in pairs]
        if arguments.kwarg:
            written.append(f"{arguments.kwarg.arg} = new Map()")
            names.append("**")
        if arguments.vararg:
            written.append(f"...{arguments.vararg.arg}")
            names.append(arguments.vararg.arg)
        return ", ".join(written), names

    def body(self, node: ast.FunctionDef, names: Sequence[str], first: str = "") -> Iterator[str]:
        scope = {*names, *_assigned(node.body)}
        scope |= {node.args.kwarg.arg} if node.args.kwarg else set()
        self.scopes.append(scope)
        local = sorted(_safe(name) for name in _assigned(node.body) - set(names))
        nonlocal_names = {
            name
            for inner in ast.walk(node)
            if isinstance(inner, ast.Nonlocal)
            for name in inner.names
        }
        local = [name for name in local if name not in nonlocal_names]
        if first:
            yield first
        if local:
            yield f"let {', '.join(local)};"
        for statement in node.body:
            yield from self.statement(statement)
        self.scopes.pop()

    def function(self, node: ast.FunctionDef, *, nested: bool = False) -> Iterator[str]:
        parameters, names = self.parameters(node, method=False)
        star = "*" if _has_yield(node) else ""
        text = "\n".join(self.body(node, names))
        written = f"py.named(function{star}({parameters}) {{\n{text}\n}}, {json.dumps(names)})"
        if _decorated(node, "lru_cache"):
            written = f"py.cached({written})"
        if _decorated(node, "contextmanager"):
            written = f"py.contextmanager({written})"
        yield f"{'' if nested else 'const '}{_safe(node.name)} = {written};"

    def class_(self, node: ast.ClassDef) -> Iterator[str]:
        bases = [base for base in node.bases if _name_of(base) not in ("Protocol", "NamedTuple")]
        extends = f" extends {self.value(bases[0])}" if bases else ""
        yield f"class {node.name}{extends} {{"
        fields = [
            (inner.target.id, inner.value)
            for inner in node.body
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
        ]
        after = [f"{node.name}.isClass = true;"]
        methods = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if _decorated(node, "dataclass"):
            yield self.field_constructor(fields, super_=bool(bases))
            after.append(f"{node.name}.sig = {json.dumps([name for name, _ in fields])};")
            after.append(f"{node.name}.fields = {node.name}.sig;")
        for inner in node.body:
            if isinstance(inner, ast.Assign):
                for target in inner.targets:
                    assert isinstance(target, ast.Name)
                    value = self.value(inner.value)
                    if value in methods:
                        value = f"{node.name}.prototype.{value}"
                    after.append(f"{node.name}.prototype.{target.id} = {value};")
            if not isinstance(inner, ast.FunctionDef):
                continue
            if f"{node.name}.{inner.name}" in self.left_out:
                continue
            yield from self.method(node, inner, after, super_=bool(bases))
        yield "}"
        yield from after

    def field_constructor(
        self, fields: Sequence[tuple[str, ast.expr | None]], *, super_: bool
    ) -> str:
        parameters = []
        for name, value in fields:
            if isinstance(value, ast.Call) and _name_of(value) == "field":
                factory = [word.value for word in value.keywords if word.arg == "default_factory"]
                made = {"dict": "new Map()", "list": "[]"}
                default = f" = {made[_name_of(factory[0])]}" if factory else ""
            else:
                default = "" if value is None else f" = {self.value(value)}"
            parameters.append(_safe(name) + default)
        text = " ".join(f"this.{name} = {_safe(name)};" for name, _ in fields)
        return f"constructor({', '.join(parameters)}) {{ {'super(); ' * super_}{text} }}"

    def method(
        self, owner: ast.ClassDef, node: ast.FunctionDef, after: list[str], *, super_: bool
    ) -> Iterator[str]:
        static = _decorated(node, "staticmethod")
        parameters, names = self.parameters(node, method=not static)
        first = "" if static else "const self = this;"
        if node.name == "__init__":
            begin = "super(); const self = this;" if super_ else first
            text = "\n".join(self.body(node, ["self", *names], begin))
            after.append(f"{owner.name}.sig = {json.dumps(names)};")
            yield f"constructor({parameters}) {{\n{text}\n}}"
            return
        text = "\n".join(self.body(node, ["self", *names], first))
        if _decorated(node, "property"):
            yield f"get {node.name}() {{\n{text}\n}}"
        elif _decorated(node, "cached_property"):
            yield f"get {node.name}() {{ return py.once(this, {node.name!r}, () => {{\n{text}\n}}); }}"
        else:
            star = "*" if _has_yield(node) else ""
            yield f"{'static ' * static}{star}{node.name}({parameters}) {{\n{text}\n}}"
            place = f"{owner.name}{'' if static else '.prototype'}.{node.name}"
            if _decorated(node, "contextmanager"):
                after.append(f"{place} = py.contextmanager({place});")
            after.append(f"{place}.sig = {json.dumps(names)};")

    # ---- statements

    def statements(self, nodes: Sequence[ast.stmt]) -> str:
        return "\n".join(line for node in nodes for line in self.statement(node))

    def statement(self, node: ast.stmt) -> Iterator[str]:
        kind = type(node).__name__
        writer = getattr(self, f"write_{kind}", None)
        if writer is None:
            raise NotImplementedError(f"{self.dotted}:{node.lineno}: {kind}")
        yield from writer(node)

    def write_Pass(self, _: ast.Pass) -> Iterator[str]:
        yield ";"

    write_Assert = write_Nonlocal = write_Pass

    def write_Break(self, _: ast.Break) -> Iterator[str]:
        yield "break;"

    def write_Continue(self, _: ast.Continue) -> Iterator[str]:
        yield "continue;"

    def write_Expr(self, node: ast.Expr) -> Iterator[str]:
        if not isinstance(node.value, ast.Constant):
            value = self.value(node.value)
            yield f"{value[1:-1] if isinstance(node.value, ast.Yield | ast.YieldFrom) else value};"

    def write_Return(self, node: ast.Return) -> Iterator[str]:
        yield f"return {'null' if node.value is None else self.value(node.value)};"

    def write_Delete(self, node: ast.Delete) -> Iterator[str]:
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                yield f"py.del({self.value(target.value)}, {self.value(target.slice)});"

    def write_FunctionDef(self, node: ast.FunctionDef) -> Iterator[str]:
        yield from self.function(node, nested=True)

    def write_Assign(self, node: ast.Assign) -> Iterator[str]:
        value = self.value(node.value)
        for target in reversed(node.targets):
            yield self.stored(target, value) + ";"
            value = self.value(_loaded(target))

    def write_AnnAssign(self, node: ast.AnnAssign) -> Iterator[str]:
        if node.value is not None:
            yield self.stored(node.target, self.value(node.value)) + ";"

    def write_AugAssign(self, node: ast.AugAssign) -> Iterator[str]:
        sum_ = f"py.{BINARY[type(node.op)]}({self.value(_loaded(node.target))}, {self.value(node.value)})"
        yield self.stored(node.target, sum_) + ";"

    def stored(self, target: ast.expr, value: str) -> str:
        """Return the assignment of a value to a target."""
        if isinstance(target, ast.Name):
            return f"{_safe(target.id)} = {value}"
        if isinstance(target, ast.Attribute):
            return f"{self.value(target.value)}.{target.attr} = {value}"
        if isinstance(target, ast.Subscript):
            return f"py.set({self.value(target.value)}, {self.value(target.slice)}, {value})"
        assert isinstance(target, ast.Tuple)
        if any(isinstance(element, ast.Subscript) for element in target.elts):
            items = self.fresh()
            parts = (
                self.stored(element, f"{items}[{index}]")
                for index, element in enumerate(target.elts)
            )
            return f"{{ const {items} = py.list({value}); {'; '.join(parts)}; }}"
        return f";{self.pattern(target)} = py.list({value})"

    def pattern(self, target: ast.expr) -> str:
        if isinstance(target, ast.Tuple | ast.List):
            return f"[{', '.join(map(self.pattern, target.elts))}]"
        if isinstance(target, ast.Starred):
            return f"...{self.pattern(target.value)}"
        if isinstance(target, ast.Attribute):
            return f"{self.value(target.value)}.{target.attr}"
        assert isinstance(target, ast.Name), ast.dump(target)
        return _safe(target.id)

    def write_If(self, node: ast.If) -> Iterator[str]:
        yield f"if ({self.test(node.test)}) {{"
        yield self.statements(node.body)
        if node.orelse:
            yield "} else {"
            yield self.statements(node.orelse)
        yield "}"

    def write_While(self, node: ast.While) -> Iterator[str]:
        yield f"while ({self.test(node.test)}) {{\n{self.statements(node.body)}\n}}"

    def write_For(self, node: ast.For) -> Iterator[str]:
        assert not node.orelse
        pattern = self.pattern(node.target)
        pattern = f";{pattern}" if pattern.startswith("[") else pattern
        item = self.fresh()
        value = f"py.list({item})" if pattern.startswith(";") else item
        yield f"for (const {item} of py.iter({self.value(node.iter)})) {{ {pattern} = {value};"
        yield self.statements(node.body)
        yield "}"

    def write_Raise(self, node: ast.Raise) -> Iterator[str]:
        yield "throw caught;" if node.exc is None else f"throw {self.value(node.exc)};"

    def write_Try(self, node: ast.Try) -> Iterator[str]:
        done = self.fresh()
        if node.orelse:
            yield f"let {done} = false;"
        yield f"try {{\n{self.statements(node.body)}"
        if node.orelse:
            yield f"{done} = true;"
        yield "}"
        if node.handlers:
            yield "catch (caught) {"
            for handler in node.handlers:
                assert handler.type is not None
                kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
                checks = " || ".join(f"caught instanceof {self.value(kind)}" for kind in kinds)
                yield f"if ({checks}) {{"
                if handler.name:
                    yield f"{_safe(handler.name)} = caught;"
                yield f"{self.statements(handler.body)}\n}} else"
            yield "{ throw caught; }\n}"
        if node.finalbody:
            yield f"finally {{\n{self.statements(node.finalbody)}\n}}"
        if node.orelse:
            yield f"if ({done}) {{\n{self.statements(node.orelse)}\n}}"

    def write_With(self, node: ast.With) -> Iterator[str]:
        closing = []
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _name_of(call) == "suppress":
                kinds = " || ".join(f"caught instanceof {self.value(kind)}" for kind in call.args)
                yield "try {"
                closing.append(f"}} catch (caught) {{ if (!({kinds})) {{ throw caught; }} }}")
                continue
            manager = self.fresh()
            yield f"const {manager} = {self.value(call)};"
            entered = f"py.enter({manager})"
            if item.optional_vars is not None:
                entered = self.stored(item.optional_vars, entered)
            yield f"{entered}; try {{"
            closing.append(f"}} finally {{ py.exit({manager}); }}")
        yield self.statements(node.body)
        yield from reversed(closing)

    def fresh(self) -> str:
        self.count += 1
        return f"t{self.count}"

    # ---- expressions

    def test(self, node: ast.expr) -> str:
        """Return a condition."""
        if isinstance(node, ast.BoolOp):
            sign = " && " if isinstance(node.op, ast.And) else " || "
            return f"({sign.join(map(self.test, node.values))})"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return f"!{self.test(node.operand)}"
        if isinstance(node, ast.Compare):
            return self.value(node)
        return f"py.t({self.value(node)})"

    def value(self, node: ast.expr) -> str:
        kind = type(node).__name__
        writer = getattr(self, f"value_{kind}", None)
        if writer is None:
            raise NotImplementedError(f"{self.dotted}:{node.lineno}: {kind}")
        return str(writer(node))

    def value_Constant(self, node: ast.Constant) -> str:
        if node.value is None or node.value is Ellipsis:
            return "null"
        if isinstance(node.value, float) and node.value == float("inf"):
            return "Infinity"
        return json.dumps(node.value, ensure_ascii=False)

    def value_Name(self, node: ast.Name) -> str:
        local = any(node.id in scope for scope in self.scopes)
        if node.id in BUILTINS and not local:
            return f"py.{node.id}"
        return _safe(node.id)

    def value_Attribute(self, node: ast.Attribute) -> str:
        owner = self.value(node.value)
        if node.attr == "__getitem__":
            return f"((key) => py.item({owner}, key))"
        if node.attr in self.methods and not isinstance(node.value, ast.Call):
            return f"py.bound({owner}, {node.attr!r})"
        return f"{owner}.{node.attr}"

    def value_Tuple(self, node: ast.Tuple | ast.List) -> str:
        return f"[{', '.join(map(self.value, node.elts))}]"

    value_List = value_Tuple

    def value_Set(self, node: ast.Set) -> str:
        return f"new Set([{', '.join(map(self.value, node.elts))}])"

    def value_Starred(self, node: ast.Starred) -> str:
        return f"...py.iter({self.value(node.value)})"

    def value_Dict(self, node: ast.Dict) -> str:
        entries = []
        for key, value in zip(node.keys, node.values, strict=True):
            written = self.value(value)
            entries.append(f"...{written}" if key is None else f"[{self.value(key)}, {written}]")
        return f"new Map([{', '.join(entries)}])"

    def value_IfExp(self, node: ast.IfExp) -> str:
        return f"({self.test(node.test)} ? {self.value(node.body)} : {self.value(node.orelse)})"

    def value_NamedExpr(self, node: ast.NamedExpr) -> str:
        return f"({_safe(node.target.id)} = {self.value(node.value)})"

    def value_UnaryOp(self, node: ast.UnaryOp) -> str:
        if isinstance(node.op, ast.Not):
            return f"(!{self.test(node.operand)})"
        assert isinstance(node.op, ast.USub)
        return f"(-{self.value(node.operand)})"

    def value_BinOp(self, node: ast.BinOp) -> str:
        name = BINARY[type(node.op)]
        return f"py.{name}({self.value(node.left)}, {self.value(node.right)})"

    def value_BoolOp(self, node: ast.BoolOp) -> str:
        name = "both" if isinstance(node.op, ast.And) else "either"
        written = self.value(node.values[-1])
        for value in reversed(node.values[:-1]):
            written = f"py.{name}({self.value(value)}, () => {written})"
        return written

    def value_Compare(self, node: ast.Compare) -> str:
        operands = [node.left, *node.comparators]
        parts = []
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            name = COMPARED[type(operator)]
            if name in ("is", "isnot"):
                sign = "==" if name == "is" else "!="
                equal = sign if _is_none(right) else f"{sign}="
                parts.append(f"({self.value(left)} {equal} {self.value(right)})")
            else:
                parts.append(f"py.{name}({self.value(left)}, {self.value(right)})")
        return parts[0] if len(parts) == 1 else f"({' && '.join(parts)})"

    def value_Subscript(self, node: ast.Subscript) -> str:
        owner = self.value(node.value)
        if isinstance(node.slice, ast.Slice):
            ends = (node.slice.lower, node.slice.upper, node.slice.step)
            written = ", ".join("null" if end is None else self.value(end) for end in ends)
            return f"py.slice({owner}, {written})"
        return f"py.item({owner}, {self.value(node.slice)})"

    def value_Lambda(self, node: ast.Lambda) -> str:
        parameters, names = self.parameters(node, method=False)
        self.scopes.append(set(names))
        written = f"(({parameters}) => ({self.value(node.body)}))"
        self.scopes.pop()
        return written

    def value_Yield(self, node: ast.Yield) -> str:
        return f"(yield {'null' if node.value is None else self.value(node.value)})"

    def value_YieldFrom(self, node: ast.YieldFrom) -> str:
        return f"(yield* py.iter({self.value(node.value)}))"

    def value_JoinedStr(self, node: ast.JoinedStr) -> str:
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                spec = '""' if part.format_spec is None else self.value(part.format_spec)
                parts.append(f"py.format({self.value(part.value)}, {spec})")
            else:
                parts.append(self.value(part))
        return f"[{', '.join(parts)}].join('')"

    def loops(
        self, generators: Sequence[ast.comprehension], innermost: str, first: str = ""
    ) -> str:
        """Return nested loops; the names that they assign have a scope already. The outermost is
        over `first`, if that has been evaluated."""
        text = innermost
        for generator in reversed(generators):
            for condition in reversed(generator.ifs):
                text = f"if ({self.test(condition)}) {{ {text} }}"
            pattern = self.pattern(generator.target)
            item = self.fresh()
            value = f"py.list({item})" if pattern.startswith("[") else item
            evaluated = first and generator is generators[0]
            items = first if evaluated else f"py.iter({self.value(generator.iter)})"
            head = f"for (const {item} of {items})"
            text = f"{head} {{ const {pattern} = {value}; {text} }}"
        return text

    def comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, use: str, first: str = ""
    ) -> str:
        names = {
            name.id
            for generator in node.generators
            for name in ast.walk(generator.target)
            if isinstance(name, ast.Name)
        }
        self.scopes.append(names)
        text = self.loops(node.generators, use.format(self.value(node.elt)), first)
        self.scopes.pop()
        return text

    def value_ListComp(self, node: ast.ListComp) -> str:
        text = self.comprehension(node, "made$.push({});")
        return f"(() => {{ const made$ = []; {text} return made$; }})()"

    def value_SetComp(self, node: ast.SetComp) -> str:
        text = self.comprehension(node, "made$.add({});")
        return f"(() => {{ const made$ = new Set(); {text} return made$; }})()"

    def value_GeneratorExp(self, node: ast.GeneratorExp) -> str:
        # What is gone through first is evaluated at once, as in Python.
        first = self.value(node.generators[0].iter)
        source = self.fresh()
        text = self.comprehension(node, "yield {};", source)
        return f"(function*({source}) {{ {text} }})(py.iter({first}))"

    def value_DictComp(self, node: ast.DictComp) -> str:
        pair = ast.copy_location(ast.Tuple([node.key, node.value], ast.Load()), node)
        whole = ast.copy_location(ast.ListComp(pair, node.generators), node)
        return f"new Map({self.value_ListComp(whole)})"

    def value_Call(self, node: ast.Call) -> str:
        callee = node.func
        if isinstance(callee, ast.Subscript):  # dict[str, int]()
            callee = callee.value
        words = [
            f"...py.object({self.value(word.value)})"
            if word.arg is None
            else f"{word.arg}: {self.value(word.value)}"
            for word in node.keywords
        ]
        given = ", ".join(map(self.value, node.args))
        named = f"{{{', '.join(words)}}}"
        if isinstance(callee, ast.Attribute):
            if isinstance(callee.value, ast.Call) and _name_of(callee.value) == "super":
                return "null"
            owner = self.value(callee.value)
            if callee.attr in METHODS and words:
                return f"py.{callee.attr}.call({named}, {', '.join(filter(None, [owner, given]))})"
            if callee.attr in METHODS:
                return f"py.{callee.attr}({', '.join(filter(None, [owner, given]))})"
            if words:
                return f"py.method({owner}, {callee.attr!r}, [{given}], {named})"
            return f"{owner}.{callee.attr}({given})"
        local = isinstance(callee, ast.Name) and any(callee.id in scope for scope in self.scopes)
        name = callee.id if isinstance(callee, ast.Name) else ""
        if name in BUILTINS and not local:
            return f"py.{name}({given})" if not words else f"py.{name}.call({named}, {given})"
        if name == "cast":
            return self.value(node.args[1])
        if name == "replace" and not local:
            return f"py.replace({given}, {named})"
        if name in self.classes and not local and not words:
            return f"new {name}({given})"
        if not words and not local and name:
            return f"py.call({_safe(name)}, [{given}])"
        return f"py.call({self.value(callee)}, [{given}], {named})"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _loaded(target: ast.expr) -> ast.expr:
    """Return a target as it is read."""
    copy = ast.parse(ast.unparse(target), mode="eval").body
    return ast.copy_location(copy, target)
