#!/usr/bin/env bash
# Fails if a release build has a vector intrinsic as a function of its own: some kernel calls it, from a closure or a function that was
# not inlined where the instruction set is enabled, and is many times slower for it.
set -euo pipefail
cd "$(dirname "$0")/.."
# Together these hold every kernel, and none of the dependencies that have vector code of their own.
binaries="exp-08-end-to-end exp-10-quantized-kernels exp-12-trit-packing exp-13-zero-density exp-14-lookup-tables"
found=0
for binary in $binaries; do
    cargo build --release -q -p experiments --bin "$binary"
    alone=$(nm -C "target/release/$binary" | grep -oE 'core_arch::.*::(_mm|v)[a-z0-9_]+$' || true)
    if [ -n "$alone" ]; then
        echo "$binary calls instead of inlining:" $alone >&2
        found=1
    fi
done
exit "$found"
