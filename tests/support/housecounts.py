"""Counts how the code reads: names, writes from outside, large classes, circles of imports, wide lines.

    python tests/support/housecounts.py [ROOT]

prints the table for the folder `lema` below ROOT, this repository if none is named. The words are those of the glossary's
other side: what a name of the grammar list says is the role of a word in a sentence, and a word of the second list had
several meanings here or is not the field's. `tests/house/test_counts.py` holds the counts below their ceilings.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx

GRAMMAR = frozenset(
    [
        "found",
        "made",
        "given",
        "known",
        "one",
        "own",
        "some",
        "less",
        "rest",
        "wanted",
        "told",
        "said",
        "other",
        "others",
        "each",
        "both",
        "whole",
    ]
)
WORDS = frozenset(
    [
        "beside",
        "turn",
        "told",
        "said",
        "tell",
        "say",
        "held",
        "kept",
        "place",
        "room",
        "site",
        "ends",
        "look",
        "apart",
        "settle",
        "accompany",
        "arrive",
        "pursue",
        "ample",
        "anew",
        "way",
        "forks",
    ]
)
NUM_COLUMNS = 100
NUM_LINES_OF_A_FUNCTION = 60
NUM_ATTRIBUTES_OF_A_CLASS = 12

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file of the package, parsed."""

    name: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        """Return its syntax tree."""
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Return every node of its tree."""
        return list(ast.walk(self.tree))


def modules_of(root: Path, package: str = "lema") -> list[Module]:
    """Return the modules of a package, by name."""
    files = sorted((root / package).rglob("*.py"))
    return [Module(_module_name(root, file), file.read_text(encoding="utf-8")) for file in files]


def _module_name(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def bound_names(module: Module) -> Iterator[str]:
    """Yield every name that is bound: functions, classes, parameters, variables and attributes."""
    for node in module.nodes:
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name
            case (
                ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield name


def identifiers(module: Module) -> Iterator[str]:
    """Yield every identifier, where it is bound and where it is used."""
    yield from bound_names(module)
    for node in module.nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                yield name
            case ast.keyword(arg=str(name)):
                yield name


def words_of(name: str) -> list[str]:
    """Return the words of a name in snake or camel case, in lower case."""
    return [
        word for word in re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_") if word
    ]


def functions(module: Module) -> list[Function]:
    """Return its functions and methods."""
    return [node for node in module.nodes if isinstance(node, Function)]


def parameters(function: Function) -> list[ast.arg]:
    """Return all parameters of a function but `self` and `cls`."""
    kinds = function.args
    starred = [parameter for parameter in (kinds.vararg, kinds.kwarg) if parameter is not None]
    named = [*kinds.posonlyargs, *kinds.args, *kinds.kwonlyargs, *starred]
    return [parameter for parameter in named if parameter.arg not in ("self", "cls")]


def grammar_names(modules: list[Module]) -> Counter[str]:
    """Count bound names that say the role of a word in a sentence."""
    names = (name.strip("_") for module in modules for name in bound_names(module))
    return Counter(name for name in names if name in GRAMMAR)


def grammar_parameters(modules: list[Module]) -> list[str]:
    """Return such names among the parameters of functions whose names are public, as `function(parameter)`."""
    public = [
        function
        for module in modules
        for function in functions(module)
        if not function.name.startswith("_")
    ]
    return [f"{f.name}({p.arg})" for f in public for p in parameters(f) if p.arg in GRAMMAR]


def listed_words(modules: list[Module]) -> Counter[str]:
    """Count identifiers by the words of the second list that they contain."""
    return Counter(
        word
        for module in modules
        for name in identifiers(module)
        for word in words_of(name)
        if word in WORDS
    )


def own_attributes(modules: list[Module]) -> set[str]:
    """Return the names of attributes that our classes set or declare."""
    names: set[str] = set()
    for module in modules:
        for node in module.nodes:
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    names.add(name)
                case ast.ClassDef():
                    declared = [
                        part.target for part in node.body if isinstance(part, ast.AnnAssign)
                    ]
                    names |= {target.id for target in declared if isinstance(target, ast.Name)}
    return names


def writes_from_outside(modules: list[Module]) -> list[str]:
    """Return the assignments to attributes of our classes on objects other than `self`, as `module:line`."""
    own = own_attributes(modules)
    return [
        f"{module.name}:{node.lineno} {ast.unparse(node)}"
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in own
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def large_classes(modules: list[Module]) -> dict[str, int]:
    """Return the classes that set more than twelve attributes on themselves, and how many; records only declare them."""
    sizes = {}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                inner = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
                own = {
                    part.attr
                    for part in inner
                    if isinstance(part.ctx, ast.Store) and _is_self(part.value)
                }
                sizes[f"{module.name}.{node.name}"] = len(own)
    return {name: size for name, size in sizes.items() if size > NUM_ATTRIBUTES_OF_A_CLASS}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def import_cycles(modules: list[Module]) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle, imports for the type checker among them.

    An import within a function is none: it is there because the two meet only when it runs.
    """
    names = {module.name for module in modules}
    graph = {module.name: _imported(module, names) for module in modules}
    circles = networkx.strongly_connected_components(networkx.DiGraph(graph))
    return sorted(sorted(group) for group in circles if len(group) > 1)


def _imported(module: Module, names: set[str]) -> set[str]:
    imports: set[str] = set()
    todo: list[ast.AST] = list(module.tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            imports |= {f"{node.module}.{name.name}" for name in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            imports |= {name.name for name in node.names}
        elif isinstance(node, ast.If | ast.Try):
            todo += node.body
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    # `from lema.engine import visit` needs the module; what a package exports lazily needs no circle.
    return {
        name for name in imports if name in names and name not in packages and name != module.name
    }


def wide_lines(modules: list[Module]) -> tuple[int, int]:
    """Return how many lines are wider than a hundred columns, and how many there are."""
    lines = [line for module in modules for line in module.source.splitlines()]
    return sum(len(line) > NUM_COLUMNS for line in lines), len(lines)


def paired_attributes(modules: list[Module]) -> list[str]:
    """Return the assignments of several attributes at once, each with a value of its own, as `module:line`."""
    return [
        f"{module.name}:{node.lineno}"
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        if any(isinstance(target, ast.Attribute) for target in node.targets[0].elts)
    ]


def bare_any(modules: list[Module]) -> int:
    """Count parameters and returned values whose whole type is `Any`."""
    every = [function for module in modules for function in functions(module)]
    annotations = [parameter.annotation for function in every for parameter in parameters(function)]
    annotations += [function.returns for function in every]
    return sum(
        isinstance(annotation, ast.Name) and annotation.id == "Any" for annotation in annotations
    )


def long_functions(modules: list[Module]) -> dict[str, int]:
    """Return the functions of more than sixty lines, and their lines."""
    sizes = {
        f"{module.name}.{function.name}": (function.end_lineno or 0) - function.lineno + 1
        for module in modules
        for function in functions(module)
    }
    return {name: size for name, size in sizes.items() if size > NUM_LINES_OF_A_FUNCTION}


def counts(root: Path) -> dict[str, int]:
    """Return every count by its name."""
    modules = modules_of(root)
    cycles = import_cycles(modules)
    wide, num_lines = wide_lines(modules)
    return {
        "names of the grammar list": grammar_names(modules).total(),
        "of these parameters of public functions": len(grammar_parameters(modules)),
        "words of the second list in identifiers": listed_words(modules).total(),
        "writes from outside to attributes of our classes": len(writes_from_outside(modules)),
        "classes that set over 12 attributes": len(large_classes(modules)),
        "circles of imports": len(cycles),
        "files in circles of imports": sum(map(len, cycles)),
        "lines over 100 columns, per thousand": 1000 * wide // num_lines,
        "attributes assigned in pairs": len(paired_attributes(modules)),
        "bare Any in signatures": bare_any(modules),
        "functions over 60 lines": len(long_functions(modules)),
    }


if __name__ == "__main__":
    ROOT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    for name, count in counts(ROOT).items():
        sys.stdout.write(f"{count:8,}  {name}\n")
