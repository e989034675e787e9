#!/usr/bin/env bash
# Compiles one release of llama-cpp-python for this CPU and compiler, once, and prints the folder that holds the wheel.
# With ggml's RPC backend: a GPU device of another process, which the tests use (GGML_RPC=OFF in CMAKE_ARGS leaves it out).
# usage: build_llama_wheel.sh PYTHON llama-cpp-python==X.Y.Z
set -euo pipefail
python=$1
requirement=$2
cc=${CC:-cc}
cxx=${CXX:-c++}

# GCC before 11.5, 12.4 and 13.3 believes that `ldtilecfg` reads 8 bytes and drops the stores to the other 56: with its AMX code
# stock llama.cpp crashes on quantized models. So ask the compiler what it does, and give it the right intrinsic where it does that.
flags=""
assembly=$(printf '%s\n' '#include <immintrin.h>' 'void f(void) { char c[64]; c[48] = 77; _tile_loadconfig(c); }' |
    "$cc" -x c -O1 -mamx-tile -S -o - - 2>/dev/null) || assembly=""
if [[ $assembly == *ldtilecfg* && $assembly != *'$77'* ]]; then
    header=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/amx_tile_config.h
    flags="-include $header"
fi

cmake_args=${CMAKE_ARGS:-}
[[ $cmake_args == *GGML_RPC* ]] || cmake_args="${cmake_args:+$cmake_args }-DGGML_RPC=ON"

key=$({
    "$cc" --version
    "$cxx" --version
    uname -m
    grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true
    [[ -z $flags ]] || cat "$header"
    echo "${CFLAGS:-} ${CXXFLAGS:-} $cmake_args"
} | sha256sum)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/powerinfer/wheels/$requirement-${key:0:12}

if ! compgen -G "$folder/llama_cpp_python-*.whl" > /dev/null; then
    {
        echo "Compiling $requirement once, which takes minutes; the wheel is kept in $folder"
        [[ -z $flags ]] || echo "$cc drops the stores in front of ldtilecfg: building with a correct intrinsic ($flags)"
    } >&2
    mkdir -p "$folder"
    part=$(mktemp -d "$folder/part.XXXXXX")
    trap 'rm -rf "$part"' EXIT
    # Not from pip's cache: it holds what was built with other flags.
    CFLAGS="${CFLAGS:-} $flags" CXXFLAGS="${CXXFLAGS:-} $flags" CMAKE_ARGS=$cmake_args \
        "$python" -m pip wheel --no-cache-dir --no-deps -w "$part" "$requirement" >&2
    if [[ $cmake_args == *GGML_RPC=ON* && $("$python" -m zipfile -l "$part"/*.whl) != */libggml-rpc.so.0\ * ]]; then
        echo "$requirement: the wheel has no libggml-rpc.so.0; CMAKE_ARGS asked for it ($cmake_args);" \
            "see the CMake output above, or leave RPC out with CMAKE_ARGS=-DGGML_RPC=OFF" >&2
        exit 1
    fi
    mv "$part"/*.whl "$folder/"
fi
echo "$folder"
