// Checks and times the Q2_0 matrix product of a ggml build through ggml's own C API.
//
//   q2_0_check oracle   products whose exact value is an integer, compared with that integer, for the plain CPU buffer
//                       and, where this build repacks Q2_0, for the repack buffer; random ones compared between the two
//   q2_0_check bench    times Q2_0, in the repack buffer if this build repacks it, and TQ2_0; one CSV line a measurement
//
// With CHECK_INTERNALS (a patched x86 build) the generic kernels also run on the repacked bytes.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#ifdef CHECK_INTERNALS
extern "C" {
typedef void mul_fn(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
mul_fn ggml_gemv_q2_0_8x8_q8_0_generic, ggml_gemv_q2_0_16x8_q8_0_generic;
mul_fn ggml_gemm_q2_0_8x8_q8_0_generic, ggml_gemm_q2_0_16x8_q8_0_generic;
void ggml_quantize_mat_q8_0_4x8(const float * x, void * vy, int64_t k);
}
#endif

static const int64_t Q2_0_WEIGHTS = 64;

struct free_buffer  { void operator()(ggml_backend_buffer_t b) { ggml_backend_buffer_free(b); } };
struct free_context { void operator()(ggml_context * c) { ggml_free(c); } };
using buffer_ptr  = std::unique_ptr<ggml_backend_buffer, free_buffer>;
using context_ptr = std::unique_ptr<ggml_context, free_context>;

static context_ptr new_context(size_t tensors) {
    ggml_init_params params = { ggml_tensor_overhead() * tensors + ggml_graph_overhead(), nullptr, true };
    return context_ptr(ggml_init(params));
}

// ---- the CPU backend and its repack buffer type --------------------------------------------------------------------

struct cpu {
    ggml_backend_t             backend = ggml_backend_cpu_init();
    ggml_backend_dev_t         dev     = ggml_backend_get_device(backend);
    ggml_backend_buffer_type_t plain   = ggml_backend_cpu_buffer_type();
    ggml_backend_buffer_type_t repack  = nullptr;
    ggml_threadpool_t          pool    = nullptr;

    cpu() {
        auto get = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
        for (ggml_backend_buffer_type_t * b = get ? get(dev) : nullptr; b && *b; b++) {
            if (strcmp(ggml_backend_buft_name(*b), "CPU_REPACK") == 0) {
                repack = *b;
            }
        }
    }
    ~cpu() {
        ggml_backend_free(backend);
        if (pool) {
            ggml_threadpool_free(pool);
        }
    }
    void threads(int n) {
        ggml_threadpool_params params = ggml_threadpool_params_default(n);
        ggml_threadpool_t next = ggml_threadpool_new(&params);
        ggml_backend_cpu_set_threadpool(backend, next);
        ggml_backend_cpu_set_n_threads(backend, n);
        if (pool) {
            ggml_threadpool_free(pool);
        }
        pool = next;
    }
};

// y = w * x, `repeat` times in one graph; with experts, y = w[id] * x through MUL_MAT_ID
struct product {
    context_ptr   wctx, ctx;
    buffer_ptr    wbuf, buf;
    ggml_tensor * w   = nullptr;
    ggml_tensor * x   = nullptr;
    ggml_tensor * ids = nullptr;
    ggml_tensor * y   = nullptr;
    ggml_cgraph * graph = nullptr;

    // false when the buffer type does not support the product
    bool build(cpu & cpu, ggml_backend_buffer_type_t buft, ggml_type type, int64_t cols, int64_t rows, int64_t batch,
               int64_t planes, int64_t experts, int repeat, const std::vector<uint8_t> & weights) {
        wctx = new_context(2);
        ctx  = new_context(8 + repeat);
        w = experts ? ggml_new_tensor_3d(wctx.get(), type, cols, rows, experts) : ggml_new_tensor_2d(wctx.get(), type, cols, rows);
        x = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, cols, experts ? 1 : batch, experts ? batch : planes);
        if (experts) {
            ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 2, batch);
        }
        graph = ggml_new_graph_custom(ctx.get(), repeat + 8, false);
        for (int i = 0; i < repeat; i++) {
            y = experts ? ggml_mul_mat_id(ctx.get(), w, x, ids) : ggml_mul_mat(ctx.get(), w, x);
            ggml_build_forward_expand(graph, y);
        }
        wbuf.reset(ggml_backend_alloc_ctx_tensors_from_buft(wctx.get(), buft));
        if (!ggml_backend_dev_supports_op(cpu.dev, y)) {
            return false;
        }
        buf.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), cpu.backend));
        ggml_backend_tensor_set(w, weights.data(), 0, weights.size());
        return true;
    }
    std::vector<float> run(cpu & cpu, const std::vector<float> & in, const std::vector<int32_t> & in_ids) {
        ggml_backend_tensor_set(x, in.data(), 0, ggml_nbytes(x));
        if (ids) {
            ggml_backend_tensor_set(ids, in_ids.data(), 0, ggml_nbytes(ids));
        }
        std::vector<float> out(ggml_nelements(y), NAN);
        ggml_backend_tensor_set(y, out.data(), 0, ggml_nbytes(y)); // a value never written stays NaN
        if (ggml_backend_graph_compute(cpu.backend, graph) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "q2_0_check: graph compute failed\n");
            exit(1);
        }
        ggml_backend_tensor_get(y, out.data(), 0, ggml_nbytes(y));
        return out;
    }
};

// ---- Q2_0 blocks: d (f16), then code j at bits 2 * (j % 4) of byte j / 4; the value is (code - 1) * d ------------------

static std::vector<uint8_t> pack(const std::vector<uint8_t> & codes, const std::vector<float> & d) {
    const size_t block_bytes = 2 + Q2_0_WEIGHTS / 4;
    std::vector<uint8_t> out(d.size() * block_bytes, 0);
    for (size_t b = 0; b < d.size(); b++) {
        const ggml_fp16_t h = ggml_fp32_to_fp16(d[b]);
        memcpy(&out[b * block_bytes], &h, sizeof(h));
        for (int64_t j = 0; j < Q2_0_WEIGHTS; j++) {
            out[b * block_bytes + 2 + j / 4] |= codes[b * Q2_0_WEIGHTS + j] << (2 * (j % 4));
        }
    }
    return out;
}

struct problem {
    int64_t cols, rows, batch, planes = 1, experts = 0;
    int     fill = 0; // of codes and activations, see below

    int64_t matrices() const { return std::max<int64_t>(experts, 1); }
    int64_t tokens() const { return experts ? batch : batch * planes; }
};

static const char * const FILLS[] = { "codes 0-2", "codes 0-3", "all +2, -127", "all -1, alternating", "zeros" };

// Integer activations in -127..127. A block of 32 whose largest magnitude is 127 gets the scale 1 exactly, so its quants
// are the activations themselves.
static void fill(const problem & p, std::mt19937 & rng, std::vector<uint8_t> & codes, std::vector<float> & x) {
    codes.resize(p.cols * p.rows * p.matrices());
    x.resize(p.cols * p.tokens());
    for (auto & c : codes) {
        c = p.fill == 0 ? rng() % 3 : p.fill == 1 || p.fill == 4 ? rng() % 4 : p.fill == 2 ? 3 : 0;
    }
    for (size_t i = 0; i < x.size(); i++) {
        switch (p.fill) {
            case 2:  x[i] = -127; break;
            case 3:  x[i] = i % 2 ? 127 : -127; break;
            case 4:  x[i] = 0; break;
            default: x[i] = i % 32 == 7 ? (rng() % 2 ? 127 : -127) : (int) (rng() % 255) - 127; break;
        }
    }
}

static int failures = 0;

static void fail(const problem & p, const char * where, int threads, size_t at, double got, double want) {
    if (++failures <= 10) {
        fprintf(stderr, "FAIL %s: %lldx%lld, batch %lld, planes %lld, experts %lld, %s, %d threads: element %zu is %.9g, expected %.9g\n",
                where, (long long) p.rows, (long long) p.cols, (long long) p.batch, (long long) p.planes, (long long) p.experts,
                FILLS[p.fill], threads, at, got, want);
    }
}

// y[token][slot][row]; slot only with experts
static std::vector<double> exact(const problem & p, const std::vector<uint8_t> & codes, const std::vector<float> & x, const std::vector<int32_t> & ids) {
    const int64_t slots = p.experts ? 2 : 1;
    std::vector<double> y;
    for (int64_t t = 0; t < p.tokens(); t++) {
        for (int64_t s = 0; s < slots; s++) {
            const int64_t matrix = p.experts ? ids[t * slots + s] : 0;
            for (int64_t r = 0; r < p.rows; r++) {
                const uint8_t * c = &codes[(matrix * p.rows + r) * p.cols];
                int64_t sum = 0;
                for (int64_t k = 0; k < p.cols; k++) {
                    sum += ((int64_t) c[k] - 1) * (int64_t) x[t * p.cols + k];
                }
                y.push_back((double) sum);
            }
        }
    }
    return y;
}

// compilers fuse multiplications and additions of the plain kernel as they like, so that its last bits differ from those of intrinsics
static const double ROUNDING = 1e-5;

// how far two results are apart, relative to the size of a typical sum
static double apart(const problem & p, double a, double b) {
    return std::fabs(a - b) / (0.03 * std::sqrt((double) p.cols));
}

#ifdef CHECK_INTERNALS
// the generic kernels on the bytes that the repack buffer holds, against the optimized ones
static int check_generic(const problem & p, product & repacked, const std::vector<float> & x, const std::vector<float> & want) {
    if (p.experts || p.planes != 1) {
        return 0;
    }
    const bool wide = ggml_cpu_has_avx512() && p.rows % 16 == 0;
    mul_fn * gemv = wide ? ggml_gemv_q2_0_16x8_q8_0_generic : ggml_gemv_q2_0_8x8_q8_0_generic;
    mul_fn * gemm = wide ? ggml_gemm_q2_0_16x8_q8_0_generic : ggml_gemm_q2_0_8x8_q8_0_generic;
    const size_t row_bytes = ggml_row_size(GGML_TYPE_Q8_0, p.cols);
    const int64_t tiled = p.batch / 4 * 4;
    std::vector<uint8_t> y(row_bytes * p.batch);
    std::vector<float> out(p.rows * p.batch);
    for (int64_t t = 0; t < tiled; t += 4) {
        ggml_quantize_mat_q8_0_4x8(&x[t * p.cols], &y[t * row_bytes], p.cols);
    }
    if (tiled) {
        gemm(p.cols, out.data(), p.rows, repacked.w->data, y.data(), tiled, p.rows);
    }
    for (int64_t t = tiled; t < p.batch; t++) {
        ggml_get_type_traits_cpu(GGML_TYPE_Q8_0)->from_float(&x[t * p.cols], &y[t * row_bytes], p.cols);
        gemv(p.cols, &out[t * p.rows], p.rows, repacked.w->data, &y[t * row_bytes], 1, p.rows);
    }
    for (size_t i = 0; i < out.size(); i++) {
        if (!(apart(p, out[i], want[i]) <= ROUNDING)) {
            fail(p, "generic", 1, i, out[i], want[i]);
        }
    }
    return 1;
}
#endif

static std::vector<problem> problems() {
    std::vector<problem> all;
    for (int64_t batch : { 1, 2, 3, 4, 5, 7, 8, 9, 12, 17, 64 }) {
        for (int64_t rows : { 4, 8, 12, 16, 24, 48 }) {
            for (int64_t cols : { 64, 128, 192, 512 }) {
                all.push_back({ cols, rows, batch });
            }
        }
    }
    for (int fill = 1; fill < 5; fill++) {
        for (int64_t batch : { 1, 4, 11 }) {
            for (int64_t rows : { 8, 16 }) {
                all.push_back({ 256, rows, batch, 1, 0, fill });
                all.push_back({ 8192 + 192, rows, batch, 1, 0, fill }); // crosses the kernels' chunks of src1
            }
        }
    }
    all.push_back({ 17408, 32, 9, 1, 0, 2 });
    all.push_back({ 192, 160, 5, 3 });           // planes of src1
    all.push_back({ 192, 16, 1, 3 });
    for (int64_t rows : { 8, 48 }) {
        all.push_back({ 192, rows, 6, 1, 3, 1 }); // experts
    }
    return all;
}

static int oracle() {
    cpu cpu;
    std::mt19937 rng(1);
    int plain = 0, repacked = 0, generic = 0, random = 0;
    double worst = 0;

    for (int threads : { 1, 2, 3 }) {
        cpu.threads(threads);
        for (const problem & p : problems()) {
            std::vector<uint8_t> codes;
            std::vector<float> x;
            fill(p, rng, codes, x);
            std::vector<int32_t> ids;
            for (int64_t t = 0; p.experts && t < p.batch; t++) {
                const int first = rng() % p.experts;
                ids.insert(ids.end(), { first, (int) ((first + 1) % p.experts) });
            }
            const auto want = exact(p, codes, x, ids);
            const std::vector<float> ones(codes.size() / Q2_0_WEIGHTS, 1.0f);

            // random scales and activations: no exact value, but the two buffers must agree
            std::vector<float> scales(ones.size()), xr(x.size());
            std::normal_distribution<float> normal;
            for (auto & d : scales) { d = 0.02f + 0.01f * std::fabs(normal(rng)); }
            for (auto & v : xr)     { v = normal(rng); }

            std::vector<float> stock_random;
            for (ggml_backend_buffer_type_t buft : { cpu.plain, cpu.repack }) {
                product prod;
                if (!buft || !prod.build(cpu, buft, GGML_TYPE_Q2_0, p.cols, p.rows, p.batch, p.planes, p.experts, 1, pack(codes, ones))) {
                    continue;
                }
                const char * name = buft == cpu.plain ? "plain buffer" : "repack buffer";
                const auto got = prod.run(cpu, x, ids);
                for (size_t i = 0; i < got.size(); i++) {
                    if (!(got[i] == want[i])) {
                        fail(p, name, threads, i, got[i], want[i]);
                    }
                }
                (buft == cpu.plain ? plain : repacked)++;

                const auto packed = pack(codes, scales);
                ggml_backend_tensor_set(prod.w, packed.data(), 0, packed.size());
                const auto got_random = prod.run(cpu, xr, ids);
                if (buft == cpu.plain) {
                    stock_random = got_random;
                    continue;
                }
                for (size_t i = 0; i < got_random.size(); i++) {
                    const double error = apart(p, got_random[i], stock_random[i]);
                    worst = std::max(worst, error);
                    if (!(error <= ROUNDING)) {
                        fail(p, "repack against plain", threads, i, got_random[i], stock_random[i]);
                    }
                }
                random++;
#ifdef CHECK_INTERNALS
                if (threads == 1) {
                    generic += check_generic(p, prod, xr, got_random);
                }
#endif
            }
        }
    }
    printf("Q2_0 oracle: %d products in the plain buffer and %d in the repack buffer equal the integer; %d random ones differ by "
           "at most %.2g; %d on the generic kernels; %d failures\n", plain, repacked, random, worst, generic, failures);
    return failures ? 1 : 0;
}

// ---- timing -----------------------------------------------------------------------------------------------------------

static double seconds(cpu & cpu, product & p) {
    const auto start = std::chrono::steady_clock::now();
    ggml_backend_graph_compute(cpu.backend, p.graph);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

static int bench(int64_t rows, int64_t cols, int64_t batch, int threads, int rounds, int repeat) {
    cpu cpu;
    cpu.threads(threads);
    std::mt19937 rng(1);

    struct variant { const char * name; ggml_backend_buffer_type_t buft; ggml_type type; product p; };
    variant variants[] = { { "q2_0 repack", cpu.repack, GGML_TYPE_Q2_0,  {} },
                           { "q2_0 plain",  cpu.plain,  GGML_TYPE_Q2_0,  {} },
                           { "tq2_0",       cpu.plain,  GGML_TYPE_TQ2_0, {} } };
    std::vector<float> x(cols * batch);
    for (auto & v : x) {
        v = (int) (rng() % 2001 - 1000) / 500.0f;
    }
    std::vector<variant *> present;
    for (auto & v : variants) {
        if (v.type == GGML_TYPE_Q2_0 && !present.empty()) {
            continue;
        }
        // any bytes are codes; the scales are not compared
        std::vector<uint8_t> bytes(ggml_row_size(v.type, cols) * rows);
        for (auto & b : bytes) {
            b = rng() & 0x2A;
        }
        if (v.buft && v.p.build(cpu, v.buft, v.type, cols, rows, batch, 1, 0, repeat, bytes)) {
            v.p.run(cpu, x, {}); // warm-up
            present.push_back(&v);
        }
    }
    printf("variant,rows,cols,batch,threads,round,gmac_per_s\n");
    for (int round = 0; round < rounds; round++) {
        for (variant * v : present) {
            printf("%s,%lld,%lld,%lld,%d,%d,%.4f\n", v->name, (long long) rows, (long long) cols, (long long) batch, threads, round,
                   1e-9 * rows * cols * batch * repeat / seconds(cpu, v->p));
        }
        fflush(stdout);
    }
    return 0;
}

int main(int argc, char ** argv) {
    ggml_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) {
            fputs(text, stderr);
        }
    }, nullptr);

    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "oracle" && argc == 2) {
        return oracle();
    }
    if (mode == "bench" && argc == 8) {
        int64_t v[6];
        for (int i = 0; i < 6; i++) {
            v[i] = atoll(argv[2 + i]);
            if (v[i] < 1) {
                fprintf(stderr, "q2_0_check: bench: '%s' is not a positive count\n", argv[2 + i]);
                return 2;
            }
        }
        return bench(v[0], v[1], v[2], (int) v[3], (int) v[4], (int) v[5]);
    }
    fprintf(stderr, "usage: q2_0_check oracle | bench ROWS COLS BATCH THREADS ROUNDS REPEAT\n");
    return 2;
}
