"""Writes Python statements as JavaScript."""

import ast
import json
from collections.abc import Iterator, Sequence

from plannerpage.expressions import ExpressionWriter
from plannerpage.syntax import BINARY, assigned, decorated, has_yield, loaded, name_of, safe

__all__ = ["StatementWriter"]


class StatementWriter(ExpressionWriter):
    """Writes the statements of a module, and its functions."""

    def body(self, node: ast.FunctionDef, names: Sequence[str], first: str = "") -> Iterator[str]:
        scope = {*names, *assigned(node.body)}
        scope |= {node.args.kwarg.arg} if node.args.kwarg else set()
        self.scopes.append(scope)
        local = sorted(safe(name) for name in assigned(node.body) - set(names))
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
        star = "*" if has_yield(node) else ""
        text = "\n".join(self.body(node, names))
        written = f"py.named(function{star}({parameters}) {{\n{text}\n}}, {json.dumps(names)})"
        if decorated(node, "lru_cache"):
            written = f"py.cached({written})"
        if decorated(node, "contextmanager"):
            written = f"py.contextmanager({written})"
        yield f"{'' if nested else 'const '}{safe(node.name)} = {written};"

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
            value = self.value(loaded(target))

    def write_AnnAssign(self, node: ast.AnnAssign) -> Iterator[str]:
        if node.value is not None:
            yield self.stored(node.target, self.value(node.value)) + ";"

    def write_AugAssign(self, node: ast.AugAssign) -> Iterator[str]:
        sum_ = f"py.{BINARY[type(node.op)]}({self.value(loaded(node.target))}, {self.value(node.value)})"
        yield self.stored(node.target, sum_) + ";"

    def stored(self, target: ast.expr, value: str) -> str:
        """Return the assignment of a value to a target."""
        if isinstance(target, ast.Name):
            return f"{safe(target.id)} = {value}"
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
                    yield f"{safe(handler.name)} = caught;"
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
            if isinstance(call, ast.Call) and name_of(call) == "suppress":
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
