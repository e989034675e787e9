#!/usr/bin/env bash
# CUDA on a machine with an NVIDIA GPU and no network: kernels against the CPU, then speed against upstream's layer offload.
# usage: gpu_check.sh --prepare ARCH OUT.tar.xz    builds everything for one architecture, e.g. 90 (needs nvcc and a network)
#        gpu_check.sh OUT.tar.xz [FOLDER]          checks, in at most LIMIT_S seconds; models and results are kept in FOLDER
set -euo pipefail

max_pack_bytes=60000000
limit_s=${LIMIT_S:-600}
layers=${LAYERS:-32}  # of the 7B shape: fewer where memory or time is short

die() {
    echo "gpu_check.sh: $*" >&2
    exit 1
}

# --- on the building machine ---

# cuBLAS for linking ggml-cuda: the toolkit's, or what pip brings. Prints CMake arguments.
cublas_arguments() {
    local nvcc toolkit folder
    nvcc=$(readlink -f "$(command -v nvcc)")
    toolkit=$(dirname "$(dirname "$nvcc")")
    if compgen -G "$toolkit/include/cublas_v2.h" > /dev/null || compgen -G "$toolkit/targets/*/include/cublas_v2.h" > /dev/null; then
        return
    fi
    "$1" -m pip install --quiet --no-deps nvidia-cublas >&2
    folder=$(dirname "$(find "$(dirname "$(dirname "$1")")" -name cublas_v2.h | head -1)")/..
    folder=$(readlink -f "$folder")
    echo "-DCUDA_cublas_LIBRARY=$(compgen -G "$folder/lib/libcublas.so.*" | head -1)" \
        "-DCUDA_cublasLt_LIBRARY=$(compgen -G "$folder/lib/libcublasLt.so.*" | head -1)" \
        "-DCMAKE_CUDA_FLAGS=-I$folder/include"
}

prepare() {
    local arch=$1 out root python work site wheels pin toolkit bytes
    [[ $arch =~ ^[0-9]+a?$ ]] || die "--prepare: architecture is '$arch'; expected a number such as 75, 89, 90 or 120; see nvidia.com/cuda-gpus."
    out=$(realpath -m "$2")
    command -v nvcc > /dev/null || die "--prepare: found no nvcc; expected CUDA 12.8 or newer in PATH; install the CUDA toolkit."
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    work=$(mktemp -d)
    # shellcheck disable=SC2064  # this folder, whatever the variable holds then
    trap "rm -rf '$work'" EXIT
    site=$work/pack/site
    mkdir -p "$site" "$work/pack/tests" "$work/pack/lib"
    # The GPU machine must have the same minor version: PYTHON=python3.12 gpu_check.sh --prepare ...
    "${PYTHON:-python3}" -m venv "$work/venv"
    python=$work/venv/bin/python
    "$python" -m pip install --quiet --upgrade pip cmake ninja
    "$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' > "$work/pack/python-version"

    # Upstream with CUDA, for any x86-64 CPU with AVX2: the machine that builds may have another one than the machine that runs.
    pin=$(sed -n 's/^requires = .*"\(llama-cpp-python==[^"]*\)".*/\1/p' "$root/pyproject.toml")
    wheels=$(CMAKE_ARGS="-DGGML_CUDA=ON -DGGML_NATIVE=OFF -DGGML_CUDA_NO_VMM=ON -DGGML_CUDA_NCCL=OFF \
-DCMAKE_CUDA_ARCHITECTURES=$arch-real $(cublas_arguments "$python")" "$root/tools/build_llama_wheel.sh" "$python" "$pin")
    "$python" -m pip install --quiet --find-links "$wheels" "$pin"

    CMAKE_ARGS="-DPOWERINFER_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=$arch-real" \
        "$python" -m pip wheel --quiet --no-deps --find-links "$wheels" -w "$work/wheels" "$root"
    "$python" -m pip install --quiet --target "$site" --find-links "$wheels" "$work"/wheels/powerinfer_py-*.whl
    "$work/venv/bin/cmake" -S "$root" -B "$work/build" -G Ninja "-DCMAKE_MAKE_PROGRAM=$work/venv/bin/ninja" "-DPython_EXECUTABLE=$python" \
        -DPOWERINFER_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch-real" -DPOWERINFER_TESTS=ON -DPOWERINFER_PYTHON=OFF > /dev/null
    "$work/venv/bin/cmake" --build "$work/build" --target test-cuda-kernels-gpu test-cuda-executor-gpu > /dev/null
    cp "$work"/build/tests/test-cuda-{kernels,executor}-gpu "$work/pack/tests/"
    toolkit=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
    cp -L "$(find -L "$toolkit" -name 'libcudart.so.*' | head -1)" "$work/pack/lib/"
    cp "${BASH_SOURCE[0]}" "$work/pack/"
    readelf -d "$site/llama_cpp/lib/libggml-cuda.so.0" | sed -n 's/.*NEEDED.*\[\(libcublas\.so\.[0-9]*\)\]/\1/p' > "$work/pack/cublas-name"

    # Small enough to carry: no symbols, no tests, and one copy of each library (a wheel holds three).
    rm -rf "$site"/include "$site"/lib "$site"/numpy/*/tests
    find "$site" -name __pycache__ -type d -prune -exec rm -rf {} +
    # Not numpy's: libraries that patchelf has changed don't survive it.
    find "$site/llama_cpp/lib" "$site/powerinfer_py" "$site/bin/powerinfer-main" "$work/pack/tests" -type f \
        \( -name '*.so*' -o -name '*-gpu' -o -name powerinfer-main \) -exec strip --strip-unneeded {} +
    "$python" - "$work/pack" << 'PYTHON_CODE'
import hashlib, os, pathlib, sys

first = {}
for path in sorted(p for p in pathlib.Path(sys.argv[1]).rglob("*") if p.is_file() and not p.is_symlink()):
    digest = hashlib.sha256(path.read_bytes()).digest()
    if digest in first:
        path.unlink()
        os.link(first[digest], path)
    else:
        first[digest] = path
PYTHON_CODE
    tar -C "$work" -cJf "$out" pack
    bytes=$(stat -c %s "$out")
    ((bytes < max_pack_bytes)) || die "$out: $bytes bytes; expected less than $max_pack_bytes; look at the largest files with tar -tvf."
    echo "$out: $bytes bytes, for sm_$arch and Python $(cat "$work/pack/python-version")"
}

# --- on the GPU machine ---

failed=0

# step SECONDS TITLE COMMAND...: runs it if there is time, and says how it went.
step() {
    local seconds=$1 title=$2 left=$((limit_s - SECONDS)) begin=$SECONDS code=0
    shift 2
    if ((left < 10)); then
        echo "-- $title: left out, the time is over"
        failed=1
        return 1
    fi
    echo "-- $title"
    timeout $((seconds < left ? seconds : left)) "$@" || code=$?
    echo "-- $title: $([[ $code == 0 ]] && echo ok || echo "FAILED, exit code $code") ($((SECONDS - begin)) s)"
    ((code == 0)) || failed=1
    return "$code"
}

check() {
    local pack=$1 folder=$2 version python cublas library
    [[ -f $pack ]] || die "$pack: not found; expected what --prepare wrote; run gpu_check.sh --prepare ARCH $pack on a machine with nvcc."
    command -v nvidia-smi > /dev/null || die "found no nvidia-smi; expected an NVIDIA GPU with its driver; run this on such a machine."
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    if [[ -z $folder ]]; then
        folder=$(mktemp -d)
        # shellcheck disable=SC2064  # this folder, whatever the variable holds then
        trap "rm -rf '$folder'" EXIT
    fi
    mkdir -p "$folder"
    tar -C "$folder" -xJf "$pack"
    version=$(cat "$folder/pack/python-version")
    python=$(command -v "python$version") || die "found no python$version; expected the version that the pack was made with; prepare it with another PYTHON."
    cublas=$(cat "$folder/pack/cublas-name")
    library=$({ ldconfig -p | sed -n "s/.*$cublas .*=> //p"; find / -xdev -name "$cublas" 2> /dev/null; } | head -1) || true
    [[ -n $library ]] || die "found no $cublas; expected the cuBLAS that the pack was made with, which is too large to be in it; install nvidia-cublas (pip)."
    export PYTHONPATH=$folder/pack/site OMP_WAIT_POLICY=passive
    export LD_LIBRARY_PATH=$folder/pack/site/llama_cpp/lib:$folder/pack/site/powerinfer_py/lib:$folder/pack/lib:$(dirname "$library")

    step 120 "kernels against the scalar set" "$folder/pack/tests/test-cuda-kernels-gpu" || true
    step 120 "executor against the CPU" "$folder/pack/tests/test-cuda-executor-gpu" || true

    local type percent mib model
    for type in q4_0 f16; do
        model=$folder/7b-$type.gguf
        if [[ ! -f $model ]]; then
            step 240 "synthetic 7B model, $type" "$python" -m powerinfer_py.cli synthetic --preset 7b --layers "$layers" --type "$type" \
                --density 0.1 -o "$model" || continue
        fi
        for percent in 25 50 75 100; do
            mib=$(($(stat -c %s "$model") * percent / 100 / 1048576))
            step 120 "$type, $percent % of the model: stock layer offload and hybrid in $mib MiB" "$python" -m powerinfer_py.cli bench "$model" \
                --modes stock,auto --vram-budget "${mib}MiB" -r 2 -p 512 -n 32 --allow-noise --json "$folder/$type-$percent.json" || true
        done
        if [[ -z $keep ]]; then
            rm -f "$folder/7b-$type".*
        fi
    done
    ((failed == 0)) || die "something failed, see above."
}

if [[ ${1:-} == --prepare && $# == 3 ]]; then
    prepare "$2" "$3"
elif [[ ${1:-} != -* && ($# == 1 || $# == 2) ]]; then
    keep=${2:-}
    check "$1" "${2:-}"
else
    sed -n '3,4p' "${BASH_SOURCE[0]}" | cut -c3- >&2
    exit 2
fi
