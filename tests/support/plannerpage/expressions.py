"""Writes Python expressions as JavaScript."""

import ast
import json
from collections.abc import Collection, Sequence

from plannerpage.syntax import (
    BINARY,
    BUILTINS,
    COMPARED,
    METHODS,
    is_none,
    name_of,
    safe,
)

__all__ = ["ExpressionWriter"]


class ExpressionWriter:
    """Writes the expressions of a module.

    Args:
        dotted: the name of the module.
        classes: the classes that are translated, of all modules.
        methods: the methods of these.
    """

    def __init__(self, dotted: str, classes: Collection[str], methods: Collection[str]) -> None:
        self.dotted = dotted  # the name of the module
        self.classes = classes
        self.methods = methods
        self.scopes: list[set[str]] = []
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"t{self.count}"

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
            safe(argument.arg) + ("" if default is None else f" = {self.value(default)}")
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
        return safe(node.id)

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
        return f"({safe(node.target.id)} = {self.value(node.value)})"

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
                equal = sign if is_none(right) else f"{sign}="
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

    def pattern(self, target: ast.expr) -> str:
        if isinstance(target, ast.Tuple | ast.List):
            return f"[{', '.join(map(self.pattern, target.elts))}]"
        if isinstance(target, ast.Starred):
            return f"...{self.pattern(target.value)}"
        if isinstance(target, ast.Attribute):
            return f"{self.value(target.value)}.{target.attr}"
        assert isinstance(target, ast.Name), ast.dump(target)
        return safe(target.id)

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
            if isinstance(callee.value, ast.Call) and name_of(callee.value) == "super":
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
            return f"py.call({safe(name)}, [{given}])"
        return f"py.call({self.value(callee)}, [{given}], {named})"
