#!/usr/bin/env bash
# The tests of formats and kernels, and the model's logits, on emulated Arm cores, one for each path that a kernel can take:
# the 8-bit matrix extension, dot products without it, neither. Time under emulation means nothing and is not reported.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
sysroot=/usr
packages=(rustc-web libstd-rust-web-dev:arm64 gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)

ready() {
    command -v qemu-aarch64 >/dev/null &&
        echo 'int main() { return 0; }' | aarch64-linux-gnu-gcc -include stdint.h -static -x c -o /dev/null - 2>/dev/null &&
        [ -x "$sysroot/bin/rustc" ] && compgen -G "$sysroot/lib/rustlib/$target/lib/libstd-*.rlib" >/dev/null
}

if ! ready; then
    install="dpkg --add-architecture arm64 && apt-get update && apt-get install -y --no-install-recommends ${packages[*]}"
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "test-arm: wants Debian's cross tools; as root: $install" >&2
        exit 2
    fi
    echo "test-arm: installing ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    eval "$install" >/dev/null
    ready || { echo "test-arm: ${packages[*]} installed, but a tool is still missing" >&2; exit 2; }
fi

export RUSTC="$sysroot/bin/rustc" CARGO_TARGET_DIR=target/arm TERN_EMULATED=1
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
# Linked statically: older versions of qemu-user hang in pthread_create of a dynamic program.
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUSTFLAGS="-C target-feature=+crt-static"
# What the tests need of optimization; a debugger's tables would double the time to link.
export CARGO_PROFILE_TEST_DEBUG=false

# on CPU SETS FILTER...: the tests that match, where exactly the kernels of SETS must run
on() {
    local cpu=$1 sets=$2
    shift 2
    echo
    echo "== $cpu: $sets"
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu $cpu" \
        TERN_EXPECT_ISA=$sets cargo test -q -p common --lib --target "$target" -- "$@"
}

echo "test-arm: building for $target"
cargo test -q -p common --lib --target "$target" --no-run
for core in "max neon,dotprod,i8mm" "cortex-a76 neon,dotprod" "cortex-a72 neon"; do
    on $core --exact --nocapture kernels::arm::tests::every_kernel_of_this_core_runs
done
on max neon,dotprod,i8mm kernels:: formats:: one_hash_of_logits
on cortex-a76 neon,dotprod kernels::
on cortex-a72 neon kernels::
echo
echo "test-arm: every kernel ran exactly on max, cortex-a76 and cortex-a72; the model gave the logits that it gives on x86"
