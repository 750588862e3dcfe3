# `just exp-04 --quick`, `just compare A B`, ...; `just` alone lists them all.

set positional-arguments

experiment := "cargo run --release -p experiments --bin"
# ggml's kernels are chosen when it is compiled, so for this CPU, in a target folder of its own
peer := "RUSTFLAGS=-Ctarget-cpu=native cargo run --release --target-dir target/peers -p peers --bin"
tern := "cargo run --release -q -p experiments --bin tern --"

[private]
default:
    @just --list --unsorted

# Memory read bandwidth, and the decode ceiling it sets
exp-01 *flags:
    {{experiment}} exp-01-memory-ceiling -- "$@"

# The 1.75-bit format against the stock 2-bit format
exp-02 *flags:
    {{experiment}} exp-02-ptq1_0-vs-pq2_0 -- "$@"

# Mask-slot decode: 16-a-slot, row pairs, wide rows
exp-03 *flags:
    {{experiment}} exp-03-mask-slot -- "$@"

# Prefill on repacked layouts
exp-04 *flags:
    {{experiment}} exp-04-row-pair-prefill -- "$@"

# Batches that are no multiple of the tile
exp-05 *flags:
    {{experiment}} exp-05-leftover-padding -- "$@"

# Prompt-lookup speculation with exact rollback
exp-06 *flags:
    {{experiment}} exp-06-speculative-decode -- "$@"

# The same text from every kernel
exp-07 *flags:
    {{experiment}} exp-07-perplexity-greedy -- "$@"

# A whole model, prompt to reply, against the replay of its products and the wall
exp-08 *flags:
    {{experiment}} exp-08-end-to-end -- "$@"

# Threads in the timed loop, preempted threads, mapped files
exp-09 *flags:
    {{experiment}} exp-09-threads-and-pages -- "$@"

# F32, Q8_0 and Q4_0: scalar against SIMD, their bits and errors, one thread to all
exp-10 *flags:
    {{experiment}} exp-10-quantized-kernels -- "$@"

# Rows in chunks from a counter, in equal parts, in fixed slices
exp-11 *flags:
    {{experiment}} exp-11-row-chunks -- "$@"

# Five trits a byte: how dense, whether lossless, how fast to unpack
exp-12 *flags:
    {{experiment}} exp-12-trit-packing -- "$@"

# Zero density: bitmap and signs against two bits and base 3
exp-13 *flags:
    {{experiment}} exp-13-zero-density -- "$@"

# Lookup tables against multiply-add
exp-14 *flags:
    {{experiment}} exp-14-lookup-tables -- "$@"

# Every layout and instruction set against its roofline
exp-15 *flags:
    {{experiment}} exp-15-roofline -- "$@"

# llama.cpp in the same run; wants cmake, libclang and a C++ compiler
exp-16 *flags:
    patches/check/run.sh --tools && {{peer}} exp-16-peers -- "$@"

# llama.cpp against llama.cpp with the patch in patches/
exp-17 *flags:
    patches/check/run.sh --tools && {{peer}} exp-17-upstream-patch -- "$@"

# Both experiments that build llama.cpp
peers *flags:
    just exp-16 "$@" && just exp-17 "$@"

# Builds llama.cpp's ggml stock and patched side by side and runs every check of the patch
patch-check:
    patches/check/run.sh

# An experiment by its full name, such as one made by new-experiment
exp name *flags:
    name="$1"; shift; {{experiment}} "$name" -- "$@"

# Every experiment of the default build, then the report; one that fails does not stop the others
all *flags:
    #!/usr/bin/env bash
    set -u
    cargo build --release -p experiments || exit
    worst=0
    for name in $(grep -o '"exp-[^"/]*"' experiments/Cargo.toml | tr -d '"' | sort); do
        just exp "$name" "$@"
        code=$?
        [ "$code" -eq 130 ] && exit 130
        [ "$code" -gt "$worst" ] && worst=$code
    done
    # The flags that say where the rows are
    where=()
    while [ $# -gt 0 ]; do
        case "$1" in
            --quick | --machine=* | --out=*) where+=("$1") ;;
            --machine | --out) where+=("$1" "${2-}"); shift ;;
        esac
        shift
    done
    just report "${where[@]}" || worst=2
    exit "$worst"

# Tables and plots into the pages and the README, from the rows of a machine
report *flags:
    {{tern}} report "$@"

# Two or more machines, or runs, side by side
compare +folders:
    {{tern}} compare "$@"

# Every claim: published, measured, verdict
claims *flags:
    {{tern}} claims "$@"

# Which file, layout and threads suit this machine, and what to expect
advise *flags:
    {{tern}} advise "$@"

# A line for a write-up
cite *what:
    {{tern}} cite "$@"

# Every committed row against schema, hash, machine and ledger
verify *folders:
    {{tern}} verify "$@"

# What a GGUF file holds
inspect *file:
    {{tern}} inspect "$@"

# A file of random weights in the shape of a 27b, 8b or 1b
synthetic *flags:
    {{tern}} synthetic "$@"

# Text from a model
generate *flags:
    {{tern}} generate "$@"

# Does one closure under two names measure the same?
lab-check *flags:
    {{tern}} lab-check "$@"

# A working skeleton for a claim of your own
new-experiment +slug:
    {{tern}} new-experiment "$@"

test:
    cargo test

# The thread pool's protocol in every interleaving that loom reaches
loom:
    RUSTFLAGS="--cfg loom" cargo test --release --target-dir target/loom -p common --lib loom

# Formats and kernels on emulated Arm cores; README says which packages it takes
test-arm:
    scripts/test-arm.sh

# A fuzz target (gguf, tokenizer, csv, pack, kernels) for some seconds, with the address sanitizer; wants cargo-fuzz and a C++ compiler
fuzz target seconds="60":
    RUSTC_BOOTSTRAP=1 cargo fuzz run --fuzz-dir fuzz {{target}} -- -max_total_time={{seconds}} -max_len=65536 -rss_limit_mb=2048
