"""Python names and syntax on their way to JavaScript: what is a builtin, what is reserved, and what a
function assigns.
"""

import ast
from collections.abc import Sequence

__all__ = [
    "BINARY",
    "BUILTINS",
    "COMPARED",
    "METHODS",
    "assigned",
    "decorated",
    "has_yield",
    "is_none",
    "loaded",
    "name_of",
    "safe",
]

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


def decorated(node: ast.FunctionDef | ast.ClassDef, *names: str) -> bool:
    return any(name_of(decorator) in names for decorator in node.decorator_list)


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def safe(name: str) -> str:
    return f"{name}_" if name in RESERVED else name


def has_yield(node: ast.AST) -> bool:
    """Whether a function is a generator by itself."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Yield | ast.YieldFrom) or has_yield(child):
            return True
    return False


def assigned(body: Sequence[ast.stmt]) -> set[str]:
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


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def loaded(target: ast.expr) -> ast.expr:
    """Return a target as it is read."""
    copy = ast.parse(ast.unparse(target), mode="eval").body
    return ast.copy_location(copy, target)
