#!/usr/bin/env bash
# Applies ggml-q2_0-wide-repack.patch to the llama.cpp tree inside the crates.io package llama-cpp-sys-2, builds stock
# and patched ggml side by side under target/patch-check, and runs q2_0_check on each.
#
#   run.sh             every check that this machine can run
#   run.sh --sources   only unpack and patch
#   run.sh --llama     unpack, patch, and build both drivers on stock and on patched ggml, for exp-17
#   run.sh --tools     only say what is missing, also for building experiments/peers
set -euo pipefail
cd "$(dirname "$0")/../.."

root=$PWD
package=llama-cpp-sys-2-0.1.161
patch=$root/patches/ggml-q2_0-wide-repack.patch
work=$root/target/patch-check
jobs=${JOBS:-2}
mode=${1:-all}

missing() { echo "patch-check: $1" >&2; exit 2; }
has() { command -v "$1" > /dev/null; }

case $mode in all | --sources | --llama | --tools) ;; *) missing "unknown flag '$mode'; expected --sources, --llama, --tools or none" ;; esac
has cargo || missing "cargo is missing: it fetches the llama.cpp sources"
has patch || missing "patch is missing: install the package patch"
has cmake || missing "cmake is missing: install the package cmake"
CXX=${CXX:-$(command -v c++ || command -v g++ || command -v clang++ || true)}
[ -n "$CXX" ] || missing "no C++ compiler: install g++ or clang++, or set CXX"
export CXX
if [ "$mode" = --tools ]; then
    # bindgen loads libclang
    found=$(ls "${LIBCLANG_PATH:-/nowhere}"/libclang* /usr/lib/llvm*/lib/libclang*.so* /usr/lib*/libclang*.so* /usr/lib/*/libclang*.so* \
        /usr/lib/llvm/*/lib*/libclang*.so* /opt/homebrew/opt/llvm/lib/libclang.dylib /usr/local/opt/llvm/lib/libclang.dylib \
        /Library/Developer/CommandLineTools/usr/lib/libclang.dylib 2> /dev/null || true)
    [ -n "$found" ] || missing "libclang is missing: install the package libclang-dev, or set LIBCLANG_PATH"
    exit 0
fi

# cargo knows where the package is unpacked; nothing is compiled
manifest=experiments/peers/Cargo.toml
locate() {
    cargo metadata --format-version 1 --locked --offline --manifest-path "$manifest" 2> /dev/null |
        grep -o "\"manifest_path\":\"[^\"]*$package[^\"]*Cargo.toml\"" | head -n 1 | sed 's/.*:"//; s/Cargo.toml"$//'
}
source=$(locate || true)
if [ -z "$source" ]; then
    cargo fetch --quiet --locked --manifest-path "$manifest" || missing "cargo cannot fetch $package, which $manifest names"
    source=$(locate || true)
fi
[ -d "${source}llama.cpp" ] || missing "$package is not where cargo says it is"

mkdir -p "$work"
if ! cmp -s "$patch" "$work/applied.patch"; then
    rm -rf "$work/stock" "$work/patched" "$work/applied.patch"
    cp -Rp "${source}llama.cpp" "$work/stock"
    cp -Rp "${source}llama.cpp" "$work/patched"
    patch -d "$work/patched" -p1 -s -F0 < "$patch"
    cp "$patch" "$work/applied.patch"
fi
echo "patch-check: $(basename "$patch") applies to $package ($(grep -c '^+[^+]' "$patch") lines added)"
[ "$mode" != --sources ] || exit 0

# GCC does not fuse multiplications and additions for every CPU. The repacked kernels do, so with the plain ones fused too both builds round
# alike, and what differs is the patch's doing.
fused=()
if echo | "$CXX" --param=avoid-fma-max-bits=0 -x c++ -E - > /dev/null 2>&1; then
    fused=(-DCMAKE_C_FLAGS=--param=avoid-fma-max-bits=0 -DCMAKE_CXX_FLAGS=--param=avoid-fma-max-bits=0)
fi

# build TREE NAME TARGET [cmake flags]
build() {
    local tree=$1 name=$2 target=$3 log=$work/$2.log
    shift 3
    cmake -S "$work/$tree" -B "$work/build-$name" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_OPENMP=OFF \
        -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
        -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_APP=OFF ${fused[@]+"${fused[@]}"} "$@" > "$log" 2>&1 &&
        cmake --build "$work/build-$name" --target "$target" -j "$jobs" >> "$log" 2>&1 ||
        missing "the build '$name' failed: see target/patch-check/$name.log"
}

# driver TREE NAME COMPILER SOURCE [flags]: links a driver with the build NAME, if that is newer
driver() {
    local tree=$1 name=$2 compiler=$3 src=$4 libs=() lib
    local out=$work/$src-$name stale=
    shift 4
    for lib in src/libllama.a ggml/src/libggml.a ggml/src/libggml-cpu.a ggml/src/libggml-base.a; do
        lib=$work/build-$name/$lib
        if [ -f "$lib" ]; then libs+=("$lib"); fi
    done
    for lib in "patches/check/$src.cpp" "${libs[@]}"; do
        if [ "$lib" -nt "$out" ]; then stale=1; fi
    done
    [ -n "$stale" ] || return 0
    "$compiler" -O2 -std=c++17 -Wall -Wextra -I "$work/$tree/include" -I "$work/$tree/ggml/include" "patches/check/$src.cpp" \
        -o "$out" "$@" "${libs[@]}" -pthread -lm
}

arch=$(uname -m)
case $arch in x86_64) internals=-DCHECK_INTERNALS ;; *) internals= ;; esac

if [ "$mode" = --llama ]; then
    # the patch touches ggml alone, so both drivers share one libllama
    build stock stock llama
    build patched patched ggml
    mkdir -p "$work/build-patched/src"
    ln -sf "$work/build-stock/src/libllama.a" "$work/build-patched/src/libllama.a"
    driver stock stock "$CXX" q2_0_check
    driver patched patched "$CXX" q2_0_check $internals
    driver stock stock "$CXX" llama_check
    driver patched patched "$CXX" llama_check
    echo "patch-check: built target/patch-check/{llama,q2_0}_check-{stock,patched}"
    exit 0
fi

# check NAME RUNNER...: runs the oracle
check() {
    local name=$1
    shift
    echo -n "patch-check: $name: "
    "$@" "$work/q2_0_check-$name" oracle
}

build stock stock ggml
driver stock stock "$CXX" q2_0_check
check stock

build patched patched ggml
driver patched patched "$CXX" q2_0_check $internals
check patched

# builds that are checked and never timed: half the time to compile, and with assertions
quick=(-DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1)

if [ "$arch" = x86_64 ]; then
    # variant NAME CPU-FLAG [cmake flags]
    variant() {
        local name=$1 flag=$2
        shift 2
        if ! grep -qw "$flag" /proc/cpuinfo 2> /dev/null; then
            echo "patch-check: $name: skipped, this CPU has no $flag"
            return
        fi
        build patched "$name" ggml "${quick[@]}" -DGGML_NATIVE=OFF "$@"
        driver patched "$name" "$CXX" q2_0_check $internals
        check "$name"
    }
    variant avx2 avx2
    variant avx-vnni avx_vnni -DGGML_AVX_VNNI=ON
    variant avx512-without-vnni avx512bw -DGGML_AVX512=ON
    variant avx512-vnni avx512_vnni -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON
fi

if has aarch64-linux-gnu-g++ && has qemu-aarch64; then
    arm() {
        local name=$1 cpu=$2 march=$3
        build patched "$name" ggml "${quick[@]}" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DGGML_NATIVE=OFF \
            -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DGGML_CPU_ARM_ARCH="$march"
        driver patched "$name" aarch64-linux-gnu-g++ q2_0_check -static
        check "$name" qemu-aarch64 -cpu "$cpu"
    }
    arm arm-dotprod cortex-a76 armv8.2-a+dotprod
    arm arm-i8mm max armv8.2-a+dotprod+i8mm
else
    echo "patch-check: arm: skipped, aarch64-linux-gnu-g++ (package g++-aarch64-linux-gnu) or qemu-aarch64 (package qemu-user) is missing"
fi
