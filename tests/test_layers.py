"""The map of the design, read from the source of every module: who imports whom, who names a chip, how long things are."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Which packages of ours each package may import besides itself.
ALLOWED = {
    "hal": frozenset[str](),
    "hal_ops": frozenset({"hal"}),
    "hal_model": frozenset({"hal", "hal_ops"}),
    "hal_engine": frozenset({"hal", "hal_ops", "hal_model"}),
    "hal_conformance": frozenset({"hal", "hal_ops", "hal_model"}),
}
BACKEND = frozenset({"hal", "hal_ops"})

# Import names of libraries that drive one kind of chip, and the parts of torch that do.
CHIP_LIBRARIES = frozenset(
    {"acl", "aiter", "amdsmi", "cuda", "cupy", "cutlass", "deep_gemm", "flash_attn", "flashinfer", "hip", "numba"}
    | {"intel_extension_for_pytorch", "pycuda", "pynvml", "tbe", "te", "tilelang", "torch_mlu", "torch_musa"}
    | {"torch_npu", "torch_xla", "triton", "triton_ascend"}
)
CHIP_PARTS_OF_TORCH = frozenset(f"torch.{part}" for part in ("cuda", "npu", "xpu", "mps", "hip", "musa", "mlu"))

# A chip's name as a word of an identifier or a string: `sm_90` and `is_cuda`, not `ascending`, nor the verb in "must ascend".
CHIP_NAME = re.compile(
    r"(?<![a-z])(cuda|rocm|(?<!not )(?<!must )ascend|npu|hopper|nvidia|amd|huawei|gfx\d*|sm_\d*)(?![a-z])",
    re.IGNORECASE,
)

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_FUNCTION_LINES = 12


def packages() -> dict[str, Path]:
    """Import name -> folder of every package of the tree that ships."""
    found = [p.parent for pattern in ("*/hal*/__init__.py", "backends/*/*/__init__.py") for p in ROOT.glob(pattern)]
    return {p.name: p for p in sorted(found) if p.parts[len(ROOT.parts)] not in {"tests", ".venv"}}


PACKAGES = packages()
BACKENDS = {name for name, folder in PACKAGES.items() if folder.parent.parent == ROOT / "backends"}
each_package = pytest.mark.parametrize("package", sorted(PACKAGES))


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text("utf-8"), str(path))


def imported(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Line and full name of all that a module imports, wherever in it, `import_module("…")` with a constant included."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(level=0, module=str(module), names=names):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)
            case ast.ImportFrom(names=names):
                yield node.lineno, f"{package}."
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def top(name: str) -> str:
    """The package that a dotted name starts with."""
    return name.partition(".")[0]


def ours(name: str) -> bool:
    """Whether an import name is of this tree, present or announced by the table above."""
    return name in PACKAGES or name in ALLOWED


def import_faults(tree: ast.Module, package: str) -> list[str]:
    """Each import of one of our packages that the map does not allow to ``package``."""
    allowed = ALLOWED.get(package, BACKEND) | {package}
    return [
        f"line {line}: {package} imports {name}, allowed are {sorted(allowed)}"
        for line, name in imported(tree, package)
        if ours(top(name)) and top(name) not in allowed
    ]


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an attribute chain that starts with a name, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def chip_library_faults(tree: ast.Module, package: str) -> list[str]:
    """Each import of a chip's library and each use of a part of torch that drives one kind of chip."""
    names = list(imported(tree, package))
    names += [(node.lineno, dotted(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    parts = [(line, name, ".".join(name.split(".")[:2])) for line, name in names]
    imports = [f"line {n}: {name}" for n, name in imported(tree, package) if top(name) in CHIP_LIBRARIES]
    return imports + [f"line {line}: {name}" for line, name, part in parts if part in CHIP_PARTS_OF_TORCH]


def docstrings(tree: ast.Module) -> set[int]:
    """Identities of the constants that are docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = [node.body[0] for node in ast.walk(tree) if isinstance(node, owners) and node.body]
    return {id(s.value) for s in first if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)}


def words(node: ast.AST) -> list[str]:
    """The identifiers and strings that a node itself holds."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.Constant(value=bytes(data)):
            return [data.decode("latin-1")]
        case ast.ImportFrom(module=str(module)):
            return [module]
        case _:
            fields = ("id", "attr", "name", "asname", "arg", "rest")
            return [value for field in fields if isinstance(value := getattr(node, field, None), str)]


def chip_name_faults(tree: ast.Module) -> list[str]:
    """Each identifier and each string, docstrings apart, that has a chip's name in it."""
    skipped = docstrings(tree)
    return [
        f"line {getattr(node, 'lineno', '?')}: {word!r} names {found[0]}"
        for node in ast.walk(tree)
        if id(node) not in skipped
        for word in words(node)
        if (found := CHIP_NAME.search(word))
    ]


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and number of lines, decorators not counted, of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def function_faults(path: Path) -> list[str]:
    """Each function of a module that is too long; a kernel's length is its chip's affair."""
    if in_kernels_folder(path):
        return []
    return [f"{name} has {lines} lines" for name, lines in functions(parse(path)) if lines > MAX_FUNCTION_LINES]


def in_kernels_folder(path: Path) -> bool:
    """Whether a module is a kernel's, whose length its chip decides."""
    return "kernels" in path.relative_to(ROOT).parts[:-1]


def modules(package: str) -> list[Path]:
    """Every module of a package."""
    return sorted(PACKAGES[package].rglob("*.py"))


def faults_of(package: str, find: Callable[[Path], list[str]]) -> list[str]:
    """What ``find`` finds in every module of a package, each with the file's name before it."""
    return [f"{path.relative_to(ROOT)}: {fault}" for path in modules(package) for fault in find(path)]


def test_every_package_of_the_tree_has_its_place_on_the_map() -> None:
    assert {"hal", "hal_ops", "hal_model", "hal_conformance", "hal_cpu"} <= PACKAGES.keys()
    assert PACKAGES.keys() - BACKENDS <= ALLOWED.keys()
    assert {PACKAGES[name].parent.name for name in BACKENDS} == {name.removeprefix("hal_") for name in BACKENDS}


@each_package
def test_a_package_says_that_it_is_typed(package: str) -> None:
    assert (PACKAGES[package] / "py.typed").is_file()


@each_package
def test_imports_point_down_only(package: str) -> None:
    assert faults_of(package, lambda path: import_faults(parse(path), package)) == []


@pytest.mark.parametrize("package", ["hal", "hal_ops", "hal_model"])
def test_no_chip_library_below_the_backends(package: str) -> None:
    assert faults_of(package, lambda path: chip_library_faults(parse(path), package)) == []


@pytest.mark.parametrize("package", ["hal_model", "hal_conformance"])
def test_the_model_and_the_suite_name_no_chip(package: str) -> None:
    assert faults_of(package, lambda path: chip_name_faults(parse(path))) == []


@each_package
def test_no_file_is_long(package: str) -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in modules(package)}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


@each_package
def test_no_function_outside_kernels_is_long(package: str) -> None:
    assert faults_of(package, function_faults) == []


@pytest.mark.parametrize("package", ["hal", "hal_ops", "hal_model", "hal_cpu"])
def test_the_median_function_is_short(package: str) -> None:
    paths = [path for path in modules(package) if not in_kernels_folder(path)]
    lengths = [lines for path in paths for _, lines in functions(parse(path))]
    assert statistics.median(lengths) <= MAX_MEDIAN_FUNCTION_LINES


def test_every_test_file_has_a_name_of_its_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


# The detectors themselves, on planted faults: a detector that finds nothing anywhere would pass all of the above.


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("hal", "import hal_ops.norm"),
        ("hal_ops", "from hal_model import layers"),
        ("hal_model", "import hal_cpu.plugin as p"),
        ("hal_model", "def f():\n    from hal_cuda.plugin import hal_info"),
        ("hal_model", "if TYPE_CHECKING:\n    import hal_engine"),
        ("hal_conformance", "importlib.import_module('hal_cpu')"),
        ("hal_cpu", "from hal_model.state import State"),
        ("hal_cuda", "import hal_rocm"),
    ],
)
def test_a_planted_import_is_found(package: str, line: str) -> None:
    assert len(import_faults(ast.parse(line), package)) == 1


@pytest.mark.parametrize(
    ("package", "line"),
    [("hal_cpu", "import hal, hal_ops, hal_cpu.device"), ("hal_model", "from . import state"), ("hal", "import torch")],
)
def test_an_allowed_import_is_none(package: str, line: str) -> None:
    assert import_faults(ast.parse(line), package) == []


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("import triton.language as tl", 1),
        ("from torch_npu import npu", 1),
        ("import torch.cuda", 1),
        ("from torch import cuda", 1),
        ("x = torch.cuda.is_available", 2),  # the chain and its part
        ("__import__('cupy')", 1),
        ("x = torch.accelerator.current_stream", 0),
        ("x = device.cuda", 0),
    ],
)
def test_a_planted_chip_library_is_found(line: str, faults: int) -> None:
    assert len(chip_library_faults(ast.parse(line), "hal")) == faults


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("x.is_cuda", 1),
        ("def f(npu): ...", 1),
        ("arch = 'sm_90'", 1),
        ("arch = f'{x}: gfx942 or newer'", 1),
        ("import hopper_tables as t", 1),
        ("f(rocm=1)", 1),
        ("match x:\n    case {'a': 1, **cuda}: ...", 1),
        ("x = 'backend ascend is absent'", 1),
        ("order = 'ascending input_size, sm'", 0),
        ("error = 'entries do not ascend'", 0),
        ("def f():\n    '''Not on cuda.'''", 0),
    ],
)
def test_a_planted_chip_name_is_found(line: str, faults: int) -> None:
    assert len(chip_name_faults(ast.parse(line))) == faults


def test_lines_of_functions_are_counted_without_decorators() -> None:
    assert dict(functions(ast.parse("@a\n@b\ndef f():\n    x = 1\n    return x"))) == {"f": 3}


@pytest.mark.parametrize(("folder", "faults"), [("backends/cpu/hal_cpu/kernels", 0), ("hal/hal", 1)])
def test_only_a_kernels_folder_is_exempt_from_the_length_of_functions(
    folder: str, faults: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ast.parse("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES)
    monkeypatch.setitem(globals(), "parse", lambda path: long)  # noqa: ARG005
    assert len(function_faults(ROOT / folder / "kernels.py")) == faults
