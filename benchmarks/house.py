"""The tree's own figures: `python -m benchmarks.house`.

Imports between folders, those inside functions and under TYPE_CHECKING included, by the
order of the table in docs/design.md; sizes of files and functions; comments; lines of
each folder; seconds that imports take and, with `--tests`, both test commands. Written
to results/house.md.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import resource
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

from benchmarks.environment import environment

ROOT = Path(__file__).parents[1]
_OUTPUT = ROOT / "benchmarks" / "results" / "house.md"
_KINDS = ("nests", "slices", "chains")  # of units, each in a file of its own
_NUM_IMPORTS = 7  # of each package, in turn; medians


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One module that another one imports, both by name."""

    importer: str
    imported: str


def modules() -> dict[str, Path]:
    """The product's modules; those of `solvers` are not listed below autosac again."""
    files = [*ROOT.glob("autosac/**/*.py"), *ROOT.glob("solvers/**/*.py")]
    return {
        _name(path): path
        for path in sorted(files)
        if not path.relative_to(ROOT).is_relative_to("autosac/solvers")
    }


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports() -> tuple[Import, ...]:
    """Every import of one module of the product by another."""
    return tuple(_imports())


def _imports() -> Iterator[Import]:
    known = modules()
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            for target in _targets(node, package):
                if target.startswith("autosac.solvers"):
                    target = target.removeprefix("autosac.")
                imported = _longest(target, known)
                if imported not in ("", name):
                    yield Import(importer=name, imported=imported)


def _targets(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package.split(".")[: package.count(".") + 2 - node.level]
        words = [*(base if node.level else ()), *filter(None, [node.module])]
        yield from (".".join([*words, alias.name]) for alias in node.names)


def _longest(target: str, known: dict[str, Path]) -> str:
    """The module that an import of a module, or of a name in it, loads."""
    while target and target not in known:
        target = target.rpartition(".")[0]
    return target


def folder(module: str) -> str:
    """The folder of a module as docs/design.md names it; '' for files beside them."""
    words = module.split(".")
    if words[0] == "solvers":
        return "solvers"
    is_folder = len(words) > 1 and (ROOT / "autosac" / words[1]).is_dir()
    return words[1] if is_folder else ""


def layers() -> list[str]:
    """Folders from the bottom up: the table in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text()
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def upward() -> list[Import]:
    """Imports of a folder by one that lies below it."""
    rank = {name: place for place, name in enumerate(layers())}
    return [
        one
        for one in imports()
        if "" not in (folder(one.importer), folder(one.imported))
        and rank[folder(one.importer)] < rank[folder(one.imported)]
    ]


def circles() -> list[list[str]]:
    """Modules that import one another, each circle once."""
    imported: dict[str, set[str]] = {name: set() for name in modules()}
    for one in imports():
        imported[one.importer].add(one.imported)
    reached = {name: _reached(name, imported) for name in imported}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imported
    }
    return sorted(list(group) for group in groups if group)


def _reached(name: str, imported: dict[str, set[str]]) -> set[str]:
    """Modules that a module imports, or that those import."""
    reached: set[str] = set()
    ahead = [*imported[name]]
    while ahead:
        other = ahead.pop()
        if other not in reached:
            reached.add(other)
            ahead += imported[other]
    return reached


# --- sizes --------------------------------------------------------------------


def _code_lines(path: Path) -> tuple[set[int], int]:
    """Lines of code, without docstrings and blank ones, and the number of comments."""
    text = path.read_text()
    code: set[int] = set()
    num_comments = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            num_comments += 1
        elif token.type not in (
            tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
            tokenize.ENDMARKER,
        ):  # fmt: skip
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                code -= set(range(value.lineno, (value.end_lineno or 0) + 1))
    return code, num_comments


def _function_lines(path: Path, code: set[int]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            lines = range(node.lineno, (node.end_lineno or 0) + 1)
            yield len(code & set(lines)), f"{_name(path)}.{node.name}"


def _named_in() -> Iterator[str]:
    """In how many files each kind of unit is named, its own included."""
    for kind in _KINDS:
        name = f"autosac.units.{kind}"
        files = {one.importer for one in imports() if one.imported == name}
        yield f"{kind} {len(files) + 1}"


def _sizes() -> Iterator[tuple[str, str]]:
    functions, comments, code_lines = [], 0, 0
    files = []
    for path in modules().values():
        code, num_comments = _code_lines(path)
        files.append((len(path.read_text().splitlines()), _name(path)))
        functions += list(_function_lines(path, code))
        comments += num_comments
        code_lines += len(code)
    total = sum(lines for lines, _ in files)
    yield "lines of product", f"{total:,} in {len(files)} files"
    yield "lines of a file, median", f"{statistics.median(n for n, _ in files):.0f}"
    yield "largest files", ", ".join(f"{n} {f}" for f, n in sorted(files)[-3:][::-1])
    lengths = [lines for lines, _ in functions]
    yield "lines of code of a function, median", f"{statistics.median(lengths):.0f}"
    longest = ", ".join(f"{n} {f}" for f, n in sorted(functions)[-3:][::-1])
    yield "longest functions, lines of code", longest
    yield "comments, to lines of code", f"{comments / code_lines:.1%}"


def _import_seconds() -> Iterator[tuple[str, str]]:
    seconds: dict[str, list[float]] = {
        "import torch": [],
        "import autosac": [],
        "from autosac import plan": [],
    }
    for _ in range(_NUM_IMPORTS):
        for statement, times in seconds.items():
            times.append(_cpu_seconds([sys.executable, "-c", statement]))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median_s in medians.items():
        ratio = median_s / medians["import torch"]
        yield f"`{name}`, median", f"{median_s:.2f} CPU s, {ratio:.2f} of torch's"


def _cpu_seconds(command: list[str]) -> float:
    """Seconds of the processor that a command takes, however busy the machine is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _test_seconds() -> Iterator[tuple[str, str]]:
    """Both test commands, with as many processes as there are cores."""
    for name, marks in (("all tests", "slow or not slow"), ("`pytest` alone", "")):
        command = [sys.executable, "-m", "pytest", "-q", *(["-m", marks] * bool(marks))]
        seconds = _seconds(command)
        yield f"{name}, {os.cpu_count()} cores", f"{seconds:.0f} s"


def _seconds(command: list[str]) -> float:
    begin = perf_counter()
    subprocess.run(command, check=True, cwd=ROOT)
    return perf_counter() - begin


# --- the page -----------------------------------------------------------------


def _folder_lines() -> Counter[str]:
    sizes: Counter[str] = Counter()
    for name, path in modules().items():
        sizes[folder(name)] += len(path.read_text().splitlines())
    return sizes


def _edges() -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for one in set(imports()):
        pair = folder(one.importer), folder(one.imported)
        if "" not in pair and pair[0] != pair[1]:
            counts[pair] += 1
    order, sizes = layers(), _folder_lines()
    for name in reversed(order):
        below = [(to, counts[name, to]) for to in order if counts[name, to]]
        imported = ", ".join(f"{to} {n}" for to, n in below)
        yield f"| {name} | {sizes[name]:,} | {imported} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house")
    parser.add_argument("--tests", action="store_true", help="time the tests, too")
    options = parser.parse_args()
    lines = ["# The tree", "", f"{environment()}", "", "| figure | |", "| --- | --- |"]
    lines += [f"| imports up the layers | {len(upward())} |"]
    lines += [f"| files that name a kind of unit | {', '.join(_named_in())} |"]
    lines += [
        f"| {name} | {value} |"
        for name, value in (
            *_sizes(),
            *_import_seconds(),
            *(_test_seconds() if options.tests else ()),
        )
    ]
    lines += ["", "From the top down, with the number of pairs of files.", ""]
    lines += ["| folder | lines | imports |", "| --- | ---: | --- |", *_edges()]
    _OUTPUT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return len(upward())


if __name__ == "__main__":
    sys.exit(main())
