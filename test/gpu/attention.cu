// attention.cu - attention_forward and attention_backward, of any GPU and of Hopper, against the reference.
//
// The tolerance of every element follows from what the kernels round: p and ds to BF16 before they enter a
// tensor core, sums to FP32, and the result to BF16. See Bounds. These tests seldom notice a missing wait in
// a kernel: after a change of one, dev/gpu.sh races runs them under racecheck.
#include "../../gpu/attention.h"

#include "../help/gpu.h"

using namespace coat;
using namespace coat::test;
using namespace coat::gpu;

namespace {

bool hopper() { return gpu_available() && gpu::device_attribute(cudaDevAttrComputeCapabilityMajor) == 9; }
#define HOPPER_TEST_CASE(name) TEST_CASE("gpu: " name* doctest::skip(!hopper()))

using Implementation = AttentionKernels (*)(const AttentionShape&);  // any_gpu_attention or hopper_attention

enum class Inputs { Normal, HeavyTails, LargeLogits };

Floats inputs(Random& rng, Format f, int64_t n, Inputs kind = Inputs::Normal) {
    if (kind != Inputs::HeavyTails) return normals(rng, f, n, kind == Inputs::LargeLogits ? 30 : 1);
    Floats x = sample(find_row(distributions(), "Student t with 2 degrees of freedom", ""), rng, n);
    for (float& v : x) v = std::clamp(v, -1e4f, 1e4f);
    return rounded(f, x);
}

// The allowed error of every element of the outputs. An element is a sum of terms, and the error of a term is
// a fraction of its magnitude, so the bound is the sum of these errors.
//
// Forward:  out = sum p v / sum p      |error| <= (u + 2 e) sum p |v|
// Backward: dv = sum p dout            |error| <= (u + e) sum p |dout|
//           ds = p (dp - delta)        |error| <= (2 u + e) |ds| + p times the errors of the sums dp, delta
//           dq, dk                     the error of ds times |k| or |q|, and times 1/sqrt(HS)
//
// u: the rounding error of p, and later of ds, in BF16; 0 for FP32.
// e: the relative error of exp(s - max) and exp(s - lse). The sum s, its scaling and the exponent are FP32:
//    a few 2^-24 of the magnitudes of the terms of s. The fast exponential adds 2^-21, and results below
//    2^-126 become 0.
//
// FP32 sums have an error of at most 2^-24 for each term.
struct Bounds {
    Doubles out, lse, dqkv;
};

// The part of one query: row t of sequence b, head h.
void add_query(const AttentionShape& s, const Floats& qkv, const Floats& out, const Floats& dout, int64_t b,
               int64_t h, int64_t t, Bounds& r) {
    const double scale = 1 / std::sqrt(double(s.HS)), u = s.format == Format::BF16 ? 0x1p-8 : 0;
    const double sums = (s.T + s.HS) * 0x1p-24;
    const int64_t cols = s.qkv_cols(), HS = s.HS, kv = h / (s.NH / s.NKV);
    const int64_t kcol = (s.NH + kv) * HS, vcol = kcol + s.NKV * HS;
    const int64_t row = b * s.T + t;
    const int64_t q = row * cols + h * HS, o = (row * s.NH + h) * HS;  // offsets in qkv and in out
    // dot = x y over the head size; magnitude is the same sum of |x y|.
    auto dot_product = [&](const float* x, const float* y, double& dot, double& magnitude) {
        for (int64_t i = 0; i < HS; i++) {
            const double xy = double(x[i]) * y[i];
            dot += xy, magnitude += std::abs(xy);
        }
    };
    Doubles p(t + 1), e(t + 1);
    double max = -INFINITY, sum = 0, worst = 0, delta = 0, delta_magnitude = 0;
    for (int64_t j = 0; j <= t; j++) {
        double dot = 0, magnitude = 0;
        dot_product(&qkv[q], &qkv[(b * s.T + j) * cols + kcol], dot, magnitude);
        p[j] = dot * scale, e[j] = 0x1p-21 + magnitude * scale * (HS * 0.5 + 8) * 0x1p-24;
        max = std::max(max, p[j]), worst = std::max(worst, e[j]);
    }
    for (double& x : p) sum += x = std::exp(x - max);
    for (double& x : p) x /= sum;
    r.lse[(b * s.NH + h) * s.T + t] = worst + sums + std::abs(max) * 0x1p-22;
    dot_product(&dout[o], &out[o], delta, delta_magnitude);
    for (int64_t j = 0; j <= t; j++) {
        const int64_t k = (b * s.T + j) * cols + kcol, v = (b * s.T + j) * cols + vcol;
        double dp = 0, magnitude = delta_magnitude;
        dot_product(&dout[o], &qkv[v], dp, magnitude);
        // The relative error of p, which backward computes from s and the saved lse.
        const double relative = e[j] + worst + sums + std::abs(max) * 0x1p-21;
        const double p_error = p[j] * (u + relative + sums) + 0x1p-126;
        // p times the errors of the sums dp and delta.
        const double sums_error = p[j] * (1 + relative) * magnitude * (HS + 8) * 0x1p-24;
        const double ds_error = scale * ((p_error + p[j] * u) * std::abs(dp - delta) + sums_error);
        for (int64_t i = 0; i < HS; i++) {
            r.out[o + i] += p_error * std::abs(qkv[v + i]);
            r.dqkv[v + i] += p_error * std::abs(dout[o + i]);
            r.dqkv[k + i] += ds_error * std::abs(qkv[q + i]);
            r.dqkv[q + i] += ds_error * std::abs(qkv[k + i]);
        }
    }
}

Bounds bounds(const AttentionShape& s, const Floats& qkv, const Floats& out, const Floats& dout) {
    Bounds r{Doubles(out.size()), Doubles(s.B * s.NH * s.T), Doubles(qkv.size())};
    const int64_t sharing = s.NH / s.NKV;  // query heads that share a key/value head
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t kv = 0; kv < s.NKV; kv++)
            for (int64_t h = kv * sharing; h < (kv + 1) * sharing; h++)
                for (int64_t t = 0; t < s.T; t++) add_query(s, qkv, out, dout, b, h, t, r);
    return r;
}

// Every element within its bound. Both results are rounded to their format, maybe in opposite directions.
void check_close(const Tensor& got, const Floats& wanted, Doubles bounds) {
    const double rounding = got.format.element_format == Format::BF16 ? 0x1p-8 : 0x1p-22;
    for (size_t i = 0; i < wanted.size(); i++) bounds[i] += rounding * std::abs(wanted[i]) + 1e-37;
    check_within(got.values(), doubles(wanted), bounds);
}

// The bounds of elements add up worst cases. In long rows they are 50 times the roundings that occur, and a
// systematic error of 1% would pass. So the error over all rows is bounded, too: in columns [first, last),
// the root of the sum of the squared errors is at most 2^-7 of that of the values (in BF16, 2^-8 was
// measured). 2^-16 of the whole tensor is allowed beside it: dq and dk of a single token are zero.
void check_relative_error(const Tensor& got, const Floats& wanted, int64_t cols, int64_t first,
                          int64_t last) {
    const Floats values = got.values();
    double error = 0, part = 0, whole = 0;
    for (size_t i = 0; i < wanted.size(); i++) {
        const double difference = double(values[i]) - wanted[i], square = double(wanted[i]) * wanted[i];
        const int64_t col = int64_t(i) % cols;
        whole += square;
        if (col < first || col >= last) continue;
        error += difference * difference;
        part += square;
    }
    INFO("columns ", first, " to ", last, " of ", cols);
    CHECK(std::sqrt(error) <= 0x1p-7 * std::sqrt(part) + 0x1p-16 * std::sqrt(whole));
}

ModelConfig config(const AttentionShape& s) {
    ModelConfig c{.name = "test",
                  .arch = LLAMA,
                  .L = 1,
                  .C = s.NH * s.HS,
                  .NH = s.NH,
                  .NKV = s.NKV,
                  .F = 16,
                  .V = 16,
                  .max_T = s.T,
                  .tied = true};
    c.head_size = s.HS;
    return c;
}

struct RopeTable : Buffer<float2> {
    explicit RopeTable(const AttentionShape& s) : Buffer(s.T * s.HS / 2) {
        gpu::fill_rope_table(config(s), s.T, get(), nullptr);
    }
};

// Where the amax of a tensor goes. Kernels take none of FP32.
float* amax_of(const Tensor& x) {
    return x.format.element_format == Format::FP32 ? nullptr : x.amax_to_raise();
}

// What forward gives, and what backward gives from exact out and lse, without RoPE and with it: each is
// checked on its own.
struct Run {
    const Tensor out, lse, dqkv, rotated_dqkv;

    Run(const AttentionShape& s, const AttentionKernels& kernels, const Floats& qkv, const Floats& exact_out,
        const Floats& exact_lse, const Floats& dout)
        : out({1, s.B * s.T * s.NH * s.HS}, TensorFormat{s.format}), lse({1, s.B * s.NH * s.T}, PLAIN_FP32),
          dqkv({s.B * s.T, s.qkv_cols()}, TensorFormat{s.format}),
          rotated_dqkv({s.B * s.T, s.qkv_cols()}, TensorFormat{s.format}) {
        const Tensor in(qkv, s.format), o(exact_out, s.format), l(exact_lse, Format::FP32), g(dout, s.format);
        const Buffer<uint8_t> workspace(kernels.workspace_bytes(s));
        const RopeTable table(s);
        kernels.forward(s, in.codes.get(), out.codes.get(), floats(lse), amax_of(out), nullptr);
        for (const Tensor* result : {&dqkv, &rotated_dqkv})
            kernels.backward(s,
                             {.qkv = in.codes.get(),
                              .out = o.codes.get(),
                              .lse = floats(l),
                              .dout = g.codes.get(),
                              .dqkv = result->codes.get(),
                              .workspace = workspace.get(),
                              .rope_table = result == &rotated_dqkv ? table.get() : nullptr,
                              .dqkv_amax_to_raise = amax_of(*result)},
                             nullptr);
    }
    static float* floats(const Tensor& x) { return reinterpret_cast<float*>(x.codes.get()); }
    bool operator==(const Run& o) const {
        return out.codes.read() == o.out.codes.read() && lse.codes.read() == o.lse.codes.read() &&
               dqkv.codes.read() == o.dqkv.codes.read() &&
               rotated_dqkv.codes.read() == o.rotated_dqkv.codes.read();
    }
};

// RoPE's inverse and the amaxes have the bits of passes over what was written.
void check_epilogues(const AttentionShape& s, const Run& run) {
    const Tensor wanted(run.dqkv.values(), {run.dqkv.rows, run.dqkv.cols}, run.dqkv.format);
    const RopeTable table(s);
    gpu::rope({.table = table.get(), .T = s.T, .HS = s.HS, .rotated_cols = (s.NH + s.NKV) * s.HS},
              wanted.ref(), /*inverse=*/true, /*qkv_amax_to_raise=*/nullptr, nullptr);
    CHECK(run.rotated_dqkv.codes.read() == wanted.codes.read());
    for (const Tensor* x : {&run.out, &run.dqkv, &run.rotated_dqkv}) {
        const Floats values = x->values();
        CHECK(x->amax() ==
              (amax_of(*x) ? reference::compute_amax(values.data(), int64_t(values.size())) : 0));
    }
}

void check(const AttentionShape& s, Implementation implementation, Inputs kind = Inputs::Normal) {
    SEEDED_RANDOM(rng);
    INFO("B ", s.B, " T ", s.T, " NH ", s.NH, " NKV ", s.NKV, " HS ", s.HS, " ",
         std::string(format_info(s.format).name),
         implementation == hopper_attention ? " on Hopper" : " on any GPU");
    const Floats qkv = inputs(rng, s.format, s.B * s.T * s.qkv_cols(), kind);
    const Inputs dout_kind = kind == Inputs::LargeLogits ? Inputs::Normal : kind;
    const Floats dout = inputs(rng, s.format, s.B * s.T * s.NH * s.HS, dout_kind);
    Floats exact_out(dout.size()), lse(s.B * s.NH * s.T), dqkv(qkv.size());
    reference::attention_forward(config(s), s.B, s.T, qkv.data(), exact_out.data(), lse.data());
    const Floats out = rounded(s.format, exact_out);
    reference::attention_backward(config(s), s.B, s.T, qkv.data(), out.data(), lse.data(), dout.data(),
                                  dqkv.data());

    const AttentionKernels kernels = implementation(s);
    const Run first(s, kernels, qkv, out, lse, dout);
    const Bounds limit = bounds(s, qkv, out, dout);
    check_close(first.out, exact_out, limit.out);
    check_close(first.lse, lse, limit.lse);
    check_close(first.dqkv, dqkv, limit.dqkv);
    check_epilogues(s, first);
    // Of other inputs the exponents are so large that FP32 rounds them more coarsely than BF16 rounds p.
    if (kind == Inputs::Normal) {
        const int64_t q = s.NH * s.HS, kv = s.NKV * s.HS;
        check_relative_error(first.out, exact_out, q, 0, q);
        check_relative_error(first.dqkv, dqkv, s.qkv_cols(), 0, q);
        check_relative_error(first.dqkv, dqkv, s.qkv_cols(), q, q + kv);
        check_relative_error(first.dqkv, dqkv, s.qkv_cols(), q + kv, q + 2 * kv);
    }
    // A second run finds nothing new under racecheck.
    if (!quick()) CHECK(first == Run(s, kernels, qkv, out, lse, dout));
}

// One token, sequences that do not fill a tile, several numbers of key/value heads: small, for sanitizers.
void check_short(Format f, int64_t HS, Implementation implementation) {
    for (int64_t T : {1, 17, 70}) check({1, T, 4, 2, HS, f}, implementation);
    for (int64_t NKV : {4, 1}) check({1, 24, 4, NKV, HS, f}, implementation);
}

// One token less and more than a tile, several tiles and sequences, and unusual inputs. Under racecheck,
// only enough tiles that each buffer is used again.
void check_long(Format f, int64_t HS, Implementation implementation) {
    if (quick()) return check({1, 520, 2, 1, HS, f}, implementation);
    for (int64_t T : {63, 64, 65, 127, 128, 129, 257}) check({2, T, 4, 2, HS, f}, implementation);
    for (int64_t NKV : {8, 2, 1}) check({1, 200, 8, NKV, HS, f}, implementation);
    check({1, 200, 14, 2, HS, f}, implementation);  // Qwen2.5: seven query heads read a key/value head
    check({1, 1024, 2, 1, HS, f}, implementation);
    // On Hopper, more sums of dk and dv over heads than there are places for them.
    if (HS == 128) check({70, 130, 4, 2, HS, f}, implementation);
    for (Inputs kind : {Inputs::HeavyTails, Inputs::LargeLogits})
        check({1, 300, 2, 2, HS, f}, implementation, kind);
}

// Head sizes that fill the columns of a tile, and others; in BF16 those that have no Hopper kernels.
void check_on_any_gpu(void (*check_sizes)(Format, int64_t, Implementation)) {
    for (int64_t HS : {8, 32, 64, 80, 128}) check_sizes(Format::FP32, HS, any_gpu_attention);
    for (int64_t HS : {32, 80}) check_sizes(Format::BF16, HS, any_gpu_attention);
}

}  // namespace

GPU_TEST_CASE("attention_forward and attention_backward on any GPU: fp32 and bf16 with many head sizes") {
    check_on_any_gpu(check_short);
    check({1, 257, 2, 1, 64, Format::FP32}, any_gpu_attention);  // several tiles, also under racecheck
}
GPU_TEST_CASE(
    "long attention_forward and attention_backward on any GPU: fp32 and bf16 with many head sizes") {
    check_on_any_gpu(check_long);
}

// The tests whose names begin with "long" do not run under racecheck, so these have several tiles too.
void check_64_and_128(Implementation implementation) {
    for (auto check_sizes : {check_short, check_long})
        for (int64_t HS : {64, 128}) check_sizes(Format::BF16, HS, implementation);
}
GPU_TEST_CASE("attention_forward and attention_backward on tensor cores: head sizes 64 and 128") {
    check_64_and_128(any_gpu_attention);
}
HOPPER_TEST_CASE("attention_forward and attention_backward on Hopper: head sizes 64 and 128") {
    check_64_and_128(hopper_attention);
}

// The blocks of a head add to dq in turns. In long sequences some multiprocessors are faster than others by
// more than a turn: without waiting, they would add in another order each time.
HOPPER_TEST_CASE("long attention_backward on Hopper: the same bits each time") {
    SEEDED_RANDOM(rng);
    for (int64_t HS : {64, 128}) {
        CAPTURE(HS);
        const AttentionShape s{1, 16384, 4, 2, HS, Format::BF16};
        const int64_t outputs = s.T * s.NH * HS, inputs = s.T * s.qkv_cols();
        const Tensor in(normals(rng, s.format, inputs), s.format), out({1, outputs}, PLAIN_BF16),
            dout(normals(rng, s.format, outputs), s.format);
        const Buffer<float> lse(s.NH * s.T);
        const AttentionKernels kernels = hopper_attention(s);
        const Buffer<uint8_t> workspace(kernels.workspace_bytes(s));
        kernels.forward(s, in.codes.get(), out.codes.get(), lse.get(), /*out_amax_to_raise=*/nullptr,
                        nullptr);
        const RopeTable table(s);
        Bytes first;
        for (int turn = 0; turn < 20; turn++) {
            const Buffer<uint8_t> dqkv(2 * inputs);
            kernels.backward(s,
                             {.qkv = in.codes.get(),
                              .out = out.codes.get(),
                              .lse = lse.get(),
                              .dout = dout.codes.get(),
                              .dqkv = dqkv.get(),
                              .workspace = workspace.get(),
                              .rope_table = table.get(),
                              .dqkv_amax_to_raise = nullptr},
                             nullptr);
            if (turn == 0) first = dqkv.read();
            else REQUIRE(dqkv.read() == first);
        }
    }
}

GPU_TEST_CASE("attention_forward and attention_backward: unsupported head sizes are rejected") {
    for (int64_t HS : {4, 136}) {
        const AttentionShape s{1, 16, 2, 2, HS, Format::BF16};
        const std::nullptr_t no{};
        CHECK_THROWS_AS(attention_forward(s, no, no, no, no, no), Error);
        CHECK_THROWS_AS(attention_backward(s, {}, no), Error);
    }
}
