"""Modules by name, pattern or class, as people name them in arguments."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from autosac.errors import ArgumentError
from autosac.step.modules import ModuleTree

Marks = str | type | Iterable[str | type]


def marks_of(marks: Marks) -> tuple[str | type, ...]:
    """Marks of modules; one of them may stand by itself, or what is no mark."""
    if isinstance(marks, (str, type)) or not isinstance(marks, Iterable):
        return (marks,)
    return tuple(marks)


def marked(
    marks: Marks, tree: ModuleTree, *, name: str, inside: bool = False
) -> frozenset[int]:
    """Indices of the modules that names, patterns of names or classes stand for.

    A class stands for its modules and those of its subclasses, by the name of the
    class: of a module that was traced, a tree knows no more.

    Args:
        marks: Names such as ``"blocks.0"``, patterns such as ``"blocks.*"``, classes,
            or one of these by itself. A name or pattern that stands for the model
            itself is ``""``; layers in a row are ``"body.0-body.2"``, as in policies.
        tree: The modules.
        name: The argument's name, for error messages.
        inside: The model itself cannot be meant.

    Raises:
        ArgumentError: One of them stands for no module, or is neither.
    """
    meant: set[int] = set()
    for mark in marks_of(marks):
        if isinstance(mark, type):
            names = _class_names(mark)
            own = {i for i, node in enumerate(tree.nodes) if node.class_name in names}
        elif isinstance(mark, str):
            own = {i for fqn, i in tree.index.items() if _is_named(fqn, mark)}
            own = own or _layers(mark, tree)
        else:
            is_plain = mark is None or isinstance(mark, (int, float))
            shown = repr(mark) if is_plain else f"a {type(mark).__name__}"
            raise ArgumentError(
                f"`{name}` has {shown}, which is no name, pattern or class of modules;"
                " names are those of `model.named_modules()`."
            )
        if inside:
            own.discard(0)
        if not own:
            shown = mark.__name__ if isinstance(mark, type) else mark
            raise ArgumentError(
                f"`{name}` has {shown!r}, which stands for no module"
                f" {'inside' if inside else 'of'} the model: use names from"
                " `model.named_modules()`, patterns such as 'blocks.*', or classes."
            )
        meant |= own
    return frozenset(meant)


def _is_named(fqn: str, mark: str) -> bool:
    return fqn == mark or (bool(fqn) and fnmatch.fnmatchcase(fqn, mark))


def _layers(mark: str, tree: ModuleTree) -> set[int]:
    """Layers of an `nn.Sequential`, named by the first one and the last one."""
    for fqn, first in tree.index.items():
        last = tree.index.get(mark.removeprefix(f"{fqn}-"), -1)
        if last > first and tree[last].parent == tree[first].parent:
            layers = range(first, last + 1)
            return {i for i in layers if tree[i].parent == tree[first].parent}
    return set()


def _class_names(kind: type) -> set[str]:
    names, left = set(), [kind]
    while left:
        one = left.pop()
        names.add(one.__name__)
        left += type.__subclasses__(one)
    return names
