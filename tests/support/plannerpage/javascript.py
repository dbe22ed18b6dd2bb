"""Writes Python modules of plain arithmetic as JavaScript: functions, dataclasses, generators.

What a module takes from another is taken from its translation, or else from `stubs`. Values keep
their meaning by the functions of `docs/planner/runtime.js`, which are called `py` here: there a list
or a tuple is an array, a dictionary a `Map`. Syntax that is not translated raises `NotImplementedError`.
"""

import ast
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from plannerpage.statements import StatementWriter
from plannerpage.syntax import BUILTINS, decorated, has_yield, name_of, safe

__all__ = ["translated"]


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
        and not decorated(inner, "property", "cached_property")
    }
    for dotted, tree in trees.items():
        module = _ModuleWriter(
            dotted, tree, exported, classes, methods, left_out, names.get(dotted)
        )
        texts.append(module.text())
        exported[dotted] = module.defined
    return "\n".join(texts)


class _ModuleWriter(StatementWriter):
    """Writes one module: what it imports, its functions, classes and constants."""

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
        super().__init__(dotted, classes, methods)
        self.tree = tree
        self.exported = exported
        self.left_out = left_out
        self.wanted = wanted
        self.defined: set[str] = set()

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
                yield f"const {safe(name)} = {self.source(node.module or '', alias.name)}.{alias.name};"
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
            yield f"const {safe(target.id)} = {value};"

    def class_(self, node: ast.ClassDef) -> Iterator[str]:
        bases = [base for base in node.bases if name_of(base) not in ("Protocol", "NamedTuple")]
        extends = f" extends {self.value(bases[0])}" if bases else ""
        yield f"class {node.name}{extends} {{"
        fields = [
            (inner.target.id, inner.value)
            for inner in node.body
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
        ]
        after = [f"{node.name}.isClass = true;"]
        methods = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if decorated(node, "dataclass"):
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
            if isinstance(value, ast.Call) and name_of(value) == "field":
                factory = [word.value for word in value.keywords if word.arg == "default_factory"]
                made = {"dict": "new Map()", "list": "[]"}
                default = f" = {made[name_of(factory[0])]}" if factory else ""
            else:
                default = "" if value is None else f" = {self.value(value)}"
            parameters.append(safe(name) + default)
        text = " ".join(f"this.{name} = {safe(name)};" for name, _ in fields)
        return f"constructor({', '.join(parameters)}) {{ {'super(); ' * super_}{text} }}"

    def method(
        self, owner: ast.ClassDef, node: ast.FunctionDef, after: list[str], *, super_: bool
    ) -> Iterator[str]:
        static = decorated(node, "staticmethod")
        parameters, names = self.parameters(node, method=not static)
        first = "" if static else "const self = this;"
        if node.name == "__init__":
            begin = "super(); const self = this;" if super_ else first
            text = "\n".join(self.body(node, ["self", *names], begin))
            after.append(f"{owner.name}.sig = {json.dumps(names)};")
            yield f"constructor({parameters}) {{\n{text}\n}}"
            return
        text = "\n".join(self.body(node, ["self", *names], first))
        if decorated(node, "property"):
            yield f"get {node.name}() {{\n{text}\n}}"
        elif decorated(node, "cached_property"):
            yield f"get {node.name}() {{ return py.once(this, {node.name!r}, () => {{\n{text}\n}}); }}"
        else:
            star = "*" if has_yield(node) else ""
            yield f"{'static ' * static}{star}{node.name}({parameters}) {{\n{text}\n}}"
            place = f"{owner.name}{'' if static else '.prototype'}.{node.name}"
            if decorated(node, "contextmanager"):
                after.append(f"{place} = py.contextmanager({place});")
            after.append(f"{place}.sig = {json.dumps(names)};")
