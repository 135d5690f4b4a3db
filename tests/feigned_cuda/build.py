"""Compiles the feigned CUDA runtime for the torch of this environment."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent / "library"
RUNTIME = ("devices", "kernels", "memory", "nccl", "streams")
_FOREIGN = re.compile(r"(?:cuda|__cuda|nccl|cublas)[A-Z_]\w*")
_HARMLESS = re.compile(
    r"cuda(?:MemPool|Profiler|FuncSet|Memcpy|GetSymbol|DeviceGetDefaultMemPool)|ncclComm(?:De)?[Rr]egister|cublas"
)
"""Functions that may do nothing. Others that are not feigned say that they are not supported."""
_FILLS_IN = {
    "cublasCreate_v2": "void **handle) { *handle = &handle; return 0; }",
    "cublasGetMathMode": "void *, int *mode) { *mode = 0; return 0; }",
    "cublasGetPointerMode_v2": "void *, int *mode) { *mode = 0; return 0; }",
    "cublasLtMatmulAlgoGetHeuristic": (
        "void *, void *, void *, void *, void *, void *, void *, int, void *, int *count) { *count = 1; return 0; }"
    ),
}


def why_not() -> str:
    """Return why it cannot be compiled here; empty if it can."""
    missing = [name for name in ("g++", "nm") if shutil.which(name) is None]
    if missing:
        return f"there is no {missing[0]}"
    return "" if _headers() else "torch is not built for CUDA"


def build(into: Path) -> Path:
    """Return the folder in `into` with the libraries, which are compiled unless they are there."""
    sources = sorted(SOURCES.iterdir())
    stubs, cuda = "\n".join(_stubs()), "\n".join(_driver())
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in sources) + f"{stubs}{cuda}".encode()).hexdigest()[
        :12
    ]
    folder = into / digest
    if not folder.exists():
        into.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f"{digest}-", dir=into))  # another process may make it at the same time
        (making / "stubs.cpp").write_text(stubs)
        (making / "cuda.cpp").write_text(cuda)
        files = [making / "stubs.cpp", *(SOURCES / f"{name}.cpp" for name in RUNTIME)]
        _compile(making / "libfeigned.so", *files)
        _compile(making / "libcuda.so.1", making / "cuda.cpp")
        _compile(making / "libnvidia-ml.so.1", SOURCES / "driver.cpp")
        if not folder.exists():
            making.rename(folder)
    return folder


def _compile(to: Path, *files: Path) -> None:
    include = [f"-I{each}" for each in _headers()]
    command = (
        "g++",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        *include,
        *map(str, files),
        "-o",
        str(to),
        "-lpthread",
    )
    subprocess.run(command, check=True)


def _packages() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parents[1]


def _headers() -> list[Path]:
    """Return the folders with CUDA's and NCCL's headers, which come with torch; Triton brings those that are left."""
    cuda = sorted((_packages() / "nvidia").glob("c*/include/cuda_runtime_api.h"))
    nccl = _packages() / "nvidia/nccl/include"
    return [cuda[0].parent, nccl, _packages() / "triton/backends/nvidia/include"] if cuda and nccl.exists() else []


def _stubs() -> Iterator[str]:
    """Yield functions for everything else that torch takes from the libraries that are replaced."""
    feigned = {name for each in RUNTIME for name in re.findall(r"\b(\w+)\(", (SOURCES / f"{each}.cpp").read_text())}
    for name in sorted(_wanted(*sorted((_packages() / "torch/lib").glob("lib*.so"))) - feigned):
        if _FOREIGN.fullmatch(name):
            result = 0 if _HARMLESS.match(name) else 801 if name.startswith("cuda") else 5
            yield f'extern "C" int {name}({_FILLS_IN.get(name, f"...) {{ return {result}; }}")}'


def _driver() -> Iterator[str]:
    """Yield the functions of libcuda.so.1, which torch only loads to ask whether a device has a context."""
    yield 'extern "C" int feigned_has_context(int) __attribute__((weak));'
    yield (
        'extern "C" int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) '
        "{ *flags = 0; *active = feigned_has_context ? feigned_has_context(device) : 0; return 0; }"
    )
    yield 'extern "C" int cuCtxGetCurrent(void **context) { *context = &context; return 0; }'
    told = {"cuDevicePrimaryCtxGetState", "cuCtxGetCurrent"}
    for name in sorted(_wanted(_packages() / "torch/lib/libcaffe2_nvrtc.so") - told):
        if re.match(r"cu[A-Z]", name):
            yield f'extern "C" int {name}(...) {{ return 0; }}'


def _wanted(*libraries: Path) -> set[str]:
    """Return the names that libraries take from others."""
    found = set()
    for library in libraries:
        listed = subprocess.run(
            ("nm", "-D", "--undefined-only", str(library)), capture_output=True, text=True, check=True
        )
        found |= {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if line.strip()}
    return found
