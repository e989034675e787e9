"""The rules of the code base that a regular expression can check: who includes what, and what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "ggml" / "src"
PACKAGE = ROOT / "powerinfer_py"
TEXT_SUFFIXES = {".py", ".cpp", ".h", ".inl", ".cu", ".cuh", ".txt", ".toml", ".cmake", ".sh", ".yml", ".yaml"}
KERNEL_ISA_HEADERS = {
    "kernels-avx2.cpp": "immintrin.h",
    "kernels-avx512.cpp": "immintrin.h",
    "kernels-amx.cpp": "immintrin.h",
    "kernels-neon.cpp": "arm_neon.h",
}

# Level of each file of ggml/src: a file includes its own level or a lower one.
LEVELS = {
    "status.h": 0,
    "format-keys.h": 0,
    "ggml-abi.h": 0,
    "kernels/kernel-table.h": 1,
    "kernels/kernel-table.cpp": 1,
    "kernels/row-types.h": 1,
    "kernels/kernel-body.inl": 1,
    "kernels/kernels-scalar.cpp": 1,
    "kernels/kernels-avx2.cpp": 1,
    "kernels/kernels-avx512.cpp": 1,
    "kernels/kernels-amx.cpp": 1,
    "kernels/kernels-neon.cpp": 1,
    "plan.h": 1,
    "plan-read.cpp": 1,
    "placement.h": 1,
    "placement.cpp": 1,
    "upstream-tiles.h": 2,
    "upstream-tiles.cpp": 2,
    "ffn.h": 2,
    "ffn-store.cpp": 2,
    "ffn-select.cpp": 2,
    "ffn-cpu.cpp": 2,
    "ffn-few.cpp": 2,
    "ffn-batch.h": 2,
    "ffn-batch.cpp": 2,
    "ffn-tiles.cpp": 2,
    "gpu/cuda-kernels.cuh": 1,
    "gpu/cuda-kernels.cu": 1,
    "gpu/cuda-executor.cu": 2,
    "kernel-bench.h": 2,
    "kernel-bench.cpp": 2,
    "gpu/gpu-devices.h": 2,
    "gpu/gpu-devices.cpp": 2,
    "gpu/gpu-measure.h": 2,
    "gpu/gpu-measure.cpp": 2,
    "gpu/gpu-executor.h": 2,
    "gpu/ggml-executor.cpp": 2,
    "ffn-hybrid.h": 3,
    "ffn-hybrid.cpp": 3,
    "device.h": 3,
    "graph-match.h": 3,
    "graph-match.cpp": 3,
    "device.cpp": 4,
    "plan-place.h": 4,
    "plan-place.cpp": 4,
    "backend.cpp": 4,
    "module.cpp": 4,
    "preload.cpp": 4,
    "model-load.h": 5,
    "model-load.cpp": 5,
    "llama-abi.h": 5,
    "vram-budget.h": 5,
    "vram-budget.cpp": 5,
}
# Python modules of the package and the modules of the package that they may import.
PYTHON_IMPORTS = {
    "__init__": {"llama"},
    "errors": set(),
    "gguf_file": {"errors"},
    "format": {"errors", "gguf_file", "_core"},
    "llama": {"errors", "format", "gguf_file", "_core"},
    "hub": {"errors", "format"},
    "bench_machine": {"errors", "_core"},
    "bench_report": {"format"},
    "bench_kernels": {"errors", "_core", "bench_machine", "bench_report"},
    "bench": {
        "errors",
        "format",
        "gguf_file",
        "_core",
        "llama",
        "hub",
        "bench_machine",
        "bench_report",
        "bench_kernels",
    },
    "chat_view": set(),
    "chat": {"errors", "format", "gguf_file", "_core", "llama", "hub", "bench", "chat_view"},
    "cli": {"errors", "format", "gguf_file", "_core", "llama", "hub", "bench", "__init__"},
}
# The same for powerinfer_py/serving/; "serving.x" is a module of that folder.
SERVING_IMPORTS = {
    "__init__": set(),
    "requests": set(),
    "fair_queue": {"errors"},
    "text_assembly": {"serving", "serving.requests"},
    "sampler": {"errors", "llama", "serving.requests"},
    "engine": {
        "errors",
        "format",
        "llama",
        "serving.fair_queue",
        "serving.requests",
        "serving.sampler",
        "serving.text_assembly",
    },
    "protocol": {"serving.requests"},
    "completions": {"errors", "serving.requests", "serving.engine"},
    "metrics": {"serving.completions", "serving.engine"},
    "app": {
        "errors",
        "serving",
        "serving.completions",
        "serving.engine",
        "serving.metrics",
        "serving.protocol",
    },
    "ray_serve": {"__init__", "_core", "errors", "format", "serving.app", "serving.engine", "serving.serve"},
    "serve": {
        "__init__",
        "bench",
        "errors",
        "format",
        "hub",
        "llama",
        "serving.app",
        "serving.completions",
        "serving.engine",
    },
}


def tracked_files() -> list[Path]:
    """Files of the repository, without what a build leaves behind."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [path for path in (ROOT / line for line in listed.stdout.splitlines()) if path.is_file()]
    skipped = {"build", ".venv", ".venv-test", "dist", "__pycache__", ".git", "out"}
    return [p for p in ROOT.rglob("*") if p.is_file() and not skipped & set(p.relative_to(ROOT).parts)]


def includes(path: Path) -> list[str]:
    """What a C++ file includes, as written."""
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE)


def cpp_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in {".h", ".cpp", ".inl", ".cu", ".cuh"})


def imported_modules(path: Path) -> set[str]:
    """Names of the modules that a Python file imports anywhere; `from a import b` counts as a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ("." * node.level) + (node.module or "")
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", cpp_files(SOURCES), ids=lambda p: str(p.relative_to(SOURCES)))
def test_core_file_includes_its_own_level_or_a_lower_one(path: Path) -> None:
    name = str(path.relative_to(SOURCES))
    assert name in LEVELS, f"{name} has no level in tests/test_layers.py"
    for include in includes(path):
        target = next((n for n in (include, str((path.parent / include).relative_to(SOURCES))) if n in LEVELS), None)
        if target is not None:
            assert LEVELS[target] <= LEVELS[name], f"{name} includes {target}"


def test_only_the_files_that_load_models_know_llama_h() -> None:
    knows = {path.name for path in cpp_files(SOURCES) if "llama.h" in includes(path)}
    assert knows == {"model-load.h", "llama-abi.h"}


@pytest.mark.parametrize(
    "path", [*cpp_files(SOURCES / "kernels"), *(SOURCES / "gpu").glob("cuda-kernels.*")], ids=lambda p: p.name
)
def test_kernels_know_neither_ggml_nor_python(path: Path) -> None:
    for include in includes(path):
        assert not re.match(r"ggml|gguf|llama|Python|nanobind|omp", include), f"{path.name} includes {include}"


@pytest.mark.parametrize("name", ["kernels-scalar.cpp", *KERNEL_ISA_HEADERS])
def test_kernel_set_includes_only_table_body_and_intrinsics(name: str) -> None:
    path = SOURCES / "kernels" / name
    if not path.exists():
        pytest.skip(f"{name} isn't part of this version")
    allowed = {"kernel-table.h", "kernel-body.inl", "row-types.h", "cstddef", "cstdint", KERNEL_ISA_HEADERS.get(name)}
    assert set(includes(path)) <= allowed


def test_cuda_headers_only_in_cuda_files() -> None:
    for path in cpp_files(ROOT / "ggml"):
        if path.parent.name == "gpu" and path.name.startswith("cuda-"):
            continue
        for include in includes(path):
            assert not re.match(r"cuda|cublas|nv", include), f"{path.name} includes {include}"


def test_instruction_set_flags_only_in_ggml_cmake() -> None:
    for path in tracked_files():
        if path.name == "CMakeLists.txt" and path.parent != ROOT / "ggml":
            assert not re.search(r"-m(avx|fma|f16c|bmi|sse|arch)", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda p: p.stem)
def test_package_module_imports_only_lower_ones(path: Path) -> None:
    names = imported_modules(path)
    assert not any(name.startswith(".") for name in names), f"{path.name} imports relatively"
    imported = {name.split(".")[1] for name in names if name.startswith("powerinfer_py.")}
    known = {p.stem for p in PACKAGE.glob("*.py")} | {"_core", "tools"}
    assert path.stem in PYTHON_IMPORTS, f"{path.name} has no entry in tests/test_layers.py"
    assert imported & known <= PYTHON_IMPORTS[path.stem]


@pytest.mark.parametrize("path", sorted((PACKAGE / "serving").glob("*.py")), ids=lambda p: p.stem)
def test_serving_module_imports_only_lower_ones(path: Path) -> None:
    imported = set()
    for name in imported_modules(path):
        parts = name.split(".")
        if parts[0] == "powerinfer_py" and len(parts) > 1:
            imported.add(".".join(parts[1:3]) if parts[1] == "serving" else parts[1])
    known = {p.stem for p in PACKAGE.glob("*.py")} | {"_core", "tools"}
    known |= {f"serving.{p.stem}" for p in (PACKAGE / "serving").glob("*.py")}
    assert path.stem in SERVING_IMPORTS, f"serving/{path.name} has no entry in tests/test_layers.py"
    assert imported & known <= SERVING_IMPORTS[path.stem]


@pytest.mark.parametrize("path", sorted((ROOT / "tools").glob("*.py")), ids=lambda p: p.stem)
def test_tools_import_format_errors_and_each_other(path: Path) -> None:
    """`_core` and `Llama` too: profiling runs models."""
    imported = {name.split(".")[1] for name in imported_modules(path) if name.startswith("powerinfer_py.")}
    known = {p.stem for p in PACKAGE.glob("*.py")}
    assert imported & known <= {
        "errors",
        "format",
        "gguf_file",
        "llama",
        "hub",
        "bench",
        "bench_machine",
        "bench_report",
    }


def test_package_doesnt_need_torch() -> None:
    for path in PACKAGE.rglob("*.py"):
        heavy = {name.split(".")[0] for name in imported_modules(path)} & {"torch", "scipy", "matplotlib"}
        assert not heavy, f"{path.name} imports {heavy}"


@pytest.mark.parametrize("path", [p for p in tracked_files() if p.suffix in TEXT_SUFFIXES], ids=lambda p: p.name)
def test_source_is_ascii(path: Path) -> None:
    text = path.read_bytes()
    wrong = next((i for i, byte in enumerate(text) if byte > 126), None)
    assert wrong is None, f"{path}: byte {text[wrong]:#x} in line {text[:wrong].count(10) + 1}"


def test_no_absolute_path_of_a_machine() -> None:
    pattern = re.compile(r"(?<![\w.$}])/(work|home|root|tmp|Users)/\w")
    for path in tracked_files():
        if path.suffix not in TEXT_SUFFIXES | {".md"} or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            assert not pattern.search(line), f"{path}:{number}: {line.strip()}"


@pytest.mark.parametrize(
    "path", [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "tools").glob("*.py"))], ids=lambda p: p.stem
)
def test_module_opens_with_one_to_three_lines_and_hides_no_standard_module(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert text, f"{path.name} has no docstring"
    assert len([line for line in text.splitlines() if line]) <= 3
    assert path.stem not in sys.stdlib_module_names if hasattr(sys, "stdlib_module_names") else True


@pytest.mark.parametrize("path", cpp_files(ROOT / "ggml"), ids=lambda p: p.name)
def test_core_file_opens_with_a_comment(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    n_comment = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    assert 1 <= n_comment <= 3, f"{path.name} opens with {n_comment} comment lines"
