// attention.cu - attention_forward and attention_backward against the CPU reference: the kernels of
// any GPU and those of Hopper.
//
// The tolerance of every element follows from what the kernels round: p and ds to BF16 before they enter a
// tensor core, sums to FP32, and the result to BF16. See Bounds. These tests seldom notice a missing wait in
// a kernel: after a change of one, dev/gpu.sh races runs them under racecheck.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "../../gpu/attention.cuh"
#include "../help/gpu.h"

using namespace coat;

namespace {

using Buffer = test::Buffer<uint8_t>;

bool hopper() {
    int major = 0;
    return test::gpu_available() &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9;
}

std::vector<uint8_t> pack(Format f, const std::vector<float>& x) {
    std::vector<uint8_t> bytes(x.size() * info(f).bytes);
    for (size_t i = 0; i < x.size(); i++) {
        const uint16_t half = reference::to_bf16(x[i]);
        if (f == Format::F32) std::memcpy(&bytes[4 * i], &x[i], 4);
        else std::memcpy(&bytes[2 * i], &half, 2);
    }
    return bytes;
}

std::vector<float> unpack(Format f, const std::vector<uint8_t>& bytes) {
    std::vector<float> x(bytes.size() / info(f).bytes);
    for (size_t i = 0; i < x.size(); i++) {
        uint16_t half;
        std::memcpy(&half, &bytes[2 * i], 2);
        if (f == Format::F32) std::memcpy(&x[i], &bytes[4 * i], 4);
        else x[i] = reference::from_bf16(half);
    }
    return x;
}

enum class Inputs { Normal, HeavyTails, LargeLogits };

// n values, rounded to f.
std::vector<float> random(Format f, size_t n, Inputs kind, uint64_t seed) {
    std::mt19937_64 bits(seed);
    std::normal_distribution<float> normal;
    std::student_t_distribution<float> heavy(2.0f);
    std::vector<float> x(n);
    for (float& v : x) {
        v = kind == Inputs::HeavyTails ? heavy(bits)
                                       : normal(bits) * (kind == Inputs::LargeLogits ? 30.0f : 1.0f);
        v = reference::round_to(f, std::clamp(v, -1e4f, 1e4f));
    }
    return x;
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
    std::vector<double> out, lse, dqkv;
};

// The part of one query: row t of sequence b, head h.
void add_query(const AttentionShape& s, const std::vector<float>& qkv, const std::vector<float>& out,
               const std::vector<float>& dout, int64_t b, int64_t h, int64_t t, Bounds& r) {
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
    std::vector<double> p(t + 1), e(t + 1);
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

Bounds bounds(const AttentionShape& s, const std::vector<float>& qkv, const std::vector<float>& out,
              const std::vector<float>& dout) {
    Bounds r{std::vector<double>(out.size()), std::vector<double>(s.B * s.NH * s.T),
             std::vector<double>(qkv.size())};
    const int64_t sharing = s.NH / s.NKV;  // query heads that share a key/value head
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t kv = 0; kv < s.NKV; kv++)
            for (int64_t h = kv * sharing; h < (kv + 1) * sharing; h++)
                for (int64_t t = 0; t < s.T; t++) add_query(s, qkv, out, dout, b, h, t, r);
    return r;
}

// Checks that every element is finite and within its bound plus the rounding of the result to its format.
void check_close(const std::string& what, Format f, const std::vector<float>& got,
                 const std::vector<float>& want, const std::vector<double>& bound) {
    REQUIRE(got.size() == want.size());
    int64_t wrong = 0;
    double worst = 0;
    for (size_t i = 0; i < got.size(); i++) {
        // Both results are rounded, possibly in opposite directions.
        const double rounding = (f == Format::BF16 ? 0x1p-8 : 0x1p-22) * std::abs(want[i]);
        const double limit = bound[i] + rounding + 1e-37, error = std::abs(double(got[i]) - want[i]);
        if (!(error <= limit) && wrong++ == 0)
            MESSAGE(what << "[" << i << "] is " << got[i] << ", expected " << want[i] << " +- " << limit);
        worst = std::max(worst, error / limit);
    }
    INFO(what << ": worst error is " << worst << " of its bound");
    CHECK(wrong == 0);
}

struct Run {
    std::vector<uint8_t> out, lse, dqkv;
    bool operator==(const Run& o) const { return out == o.out && lse == o.lse && dqkv == o.dqkv; }
};

// Runs forward, and then backward from the given out and lse instead of forward's, so that each is checked on
// its own.
Run run(const AttentionShape& s, AttentionKernel kernel, const std::vector<float>& qkv,
        const std::vector<float>& out, const std::vector<float>& lse, const std::vector<float>& dout) {
    const Buffer in(pack(s.format, qkv)), o(pack(s.format, out)), l(pack(Format::F32, lse)),
        g(pack(s.format, dout));
    const Buffer to(int64_t(pack(s.format, out).size())), to_lse(int64_t(lse.size() * 4));
    const Buffer grad(int64_t(pack(s.format, qkv).size())), workspace(int64_t(attention_workspace(s)));
    attention_forward(s, in.get(), to.get(), reinterpret_cast<float*>(to_lse.get()), nullptr, kernel);
    attention_backward(s, in.get(), o.get(), reinterpret_cast<const float*>(l.get()), g.get(), grad.get(),
                       workspace.get(), nullptr, kernel);
    test::succeeded(cudaDeviceSynchronize());
    return {to.read(), to_lse.read(), grad.read()};
}

ModelConfig config(const AttentionShape& s) {
    ModelConfig c{"test", LLAMA, 1, s.NH * s.HS, s.NH, s.NKV, 16, 16, s.T, true};
    c.head_size = s.HS;
    return c;
}

void check(const AttentionShape& s, AttentionKernel kernel, Inputs kind = Inputs::Normal,
           uint64_t seed = test::run_seed()) {
    INFO("B " << s.B << " T " << s.T << " NH " << s.NH << " NKV " << s.NKV << " HS " << s.HS << " "
              << std::string(info(s.format).name) << " kernel " << int(kernel) << " seed " << seed);
    const size_t rows = s.B * s.T;
    const std::vector<float> qkv = random(s.format, rows * s.qkv_cols(), kind, seed);
    const Inputs dout_kind = kind == Inputs::LargeLogits ? Inputs::Normal : kind;
    const std::vector<float> dout = random(s.format, rows * s.NH * s.HS, dout_kind, seed + 1);
    std::vector<float> out(dout.size()), lse(s.B * s.NH * s.T), dqkv(qkv.size());
    reference::attention_forward(config(s), s.B, s.T, qkv.data(), out.data(), lse.data());
    const std::vector<float> exact_out = out;
    for (float& x : out) x = reference::round_to(s.format, x);
    reference::attention_backward(config(s), s.B, s.T, qkv.data(), out.data(), lse.data(), dout.data(),
                                  dqkv.data());

    const Run first = run(s, kernel, qkv, out, lse, dout);
    const Bounds limit = bounds(s, qkv, out, dout);
    check_close("out", s.format, unpack(s.format, first.out), exact_out, limit.out);
    check_close("lse", Format::F32, unpack(Format::F32, first.lse), lse, limit.lse);
    check_close("dqkv", s.format, unpack(s.format, first.dqkv), dqkv, limit.dqkv);
    // A second run finds nothing new under racecheck.
    if (!test::quick()) CHECK(first == run(s, kernel, qkv, out, lse, dout));
}

// One token, sequences that do not fill a tile, and several numbers of key/value heads. The sizes are small
// because a launch takes seconds under a sanitizer.
void check_short(Format f, int64_t HS, AttentionKernel kernel) {
    for (int64_t T : {1, 17, 70}) check({1, T, 4, 2, HS, f}, kernel);
    for (int64_t NKV : {4, 1}) check({1, 24, 4, NKV, HS, f}, kernel);
}

// One token less and more than a tile, several tiles and sequences, and unusual inputs. Under racecheck,
// only enough tiles that each buffer is used again.
void check_long(Format f, int64_t HS, AttentionKernel kernel) {
    if (test::quick()) return check({1, 520, 2, 1, HS, f}, kernel);
    for (int64_t T : {63, 64, 65, 127, 128, 129, 257}) check({2, T, 4, 2, HS, f}, kernel);
    for (int64_t NKV : {8, 2, 1}) check({1, 200, 8, NKV, HS, f}, kernel);
    check({1, 200, 14, 2, HS, f}, kernel);  // Qwen2.5: seven query heads read a key/value head
    check({1, 1024, 2, 1, HS, f}, kernel);
    for (Inputs kind : {Inputs::HeavyTails, Inputs::LargeLogits}) check({1, 300, 2, 2, HS, f}, kernel, kind);
}

// Head sizes that fill the columns of a tile, and others; in BF16 those that have no Hopper kernels.
void check_on_any_gpu(void (*check_sizes)(Format, int64_t, AttentionKernel)) {
    for (int64_t HS : {8, 32, 64, 80, 128, 256}) check_sizes(Format::F32, HS, AttentionKernel::AnyGpu);
    for (int64_t HS : {32, 80, 256}) check_sizes(Format::BF16, HS, AttentionKernel::AnyGpu);
}

}  // namespace

GPU_TEST_CASE("attention_forward and attention_backward on any GPU: fp32 and bf16, many head sizes") {
    check_on_any_gpu(check_short);
}
GPU_TEST_CASE("long attention_forward and attention_backward on any GPU: fp32 and bf16, many head sizes") {
    check_on_any_gpu(check_long);
}

// The tests whose names begin with "long" do not run under racecheck, so these have several tiles too.
GPU_TEST_CASE("attention_forward and attention_backward on tensor cores: head sizes 64 and 128") {
    for (auto check_sizes : {check_short, check_long})
        for (int64_t HS : {64, 128}) check_sizes(Format::BF16, HS, AttentionKernel::AnyGpu);
}
GPU_TEST_CASE("attention_forward and attention_backward on CUDA cores: several tiles") {
    check({1, 257, 2, 1, 64, Format::F32}, AttentionKernel::AnyGpu);
}

TEST_CASE("gpu: attention_forward and attention_backward on Hopper: head size 64" *
          doctest::skip(!hopper())) {
    for (auto check_sizes : {check_short, check_long}) check_sizes(Format::BF16, 64, AttentionKernel::Hopper);
}
TEST_CASE("gpu: attention_forward and attention_backward on Hopper: head size 128" *
          doctest::skip(!hopper())) {
    for (auto check_sizes : {check_short, check_long})
        check_sizes(Format::BF16, 128, AttentionKernel::Hopper);
}

// The blocks of a head add to dq in turns. In long sequences some multiprocessors are faster than others by
// more than a turn: without waiting, they would add in another order each time.
TEST_CASE("gpu: long attention_backward on Hopper: the same bits each time" * doctest::skip(!hopper())) {
    FRESH_RANDOM(rng);
    for (int64_t HS : {64, 128}) {
        CAPTURE(HS);
        const AttentionShape s{1, 16384, 4, 2, HS, Format::BF16};
        const std::vector<float> qkv = random(s.format, s.T * s.qkv_cols(), Inputs::Normal, rng.bits());
        const std::vector<float> dout = random(s.format, s.T * s.NH * HS, Inputs::Normal, rng.bits());
        const Buffer in(pack(s.format, qkv)), gradient(pack(s.format, dout)), out(int64_t(2 * dout.size()));
        const Buffer lse(4 * s.NH * s.T), workspace(int64_t(attention_workspace(s)));
        float* const sums = reinterpret_cast<float*>(lse.get());
        attention_forward(s, in.get(), out.get(), sums, nullptr, AttentionKernel::Hopper);
        std::vector<uint8_t> first;
        for (int turn = 0; turn < 20; turn++) {
            const Buffer dqkv(int64_t(2 * qkv.size()));
            attention_backward(s, in.get(), out.get(), sums, gradient.get(), dqkv.get(), workspace.get(),
                               nullptr, AttentionKernel::Hopper);
            if (turn == 0) first = dqkv.read();
            else REQUIRE(dqkv.read() == first);
        }
    }
}

GPU_TEST_CASE("attention_forward and attention_backward: unsupported head sizes and formats are rejected") {
    for (int64_t HS : {4, 264})
        CHECK_THROWS_AS(
            attention_forward({1, 16, 2, 2, HS, Format::BF16}, nullptr, nullptr, nullptr, nullptr), Error);
    auto check_rejected = [](const AttentionShape& s, AttentionKernel kernel) {
        CHECK_THROWS_AS(attention_forward(s, nullptr, nullptr, nullptr, nullptr, kernel), Error);
        CHECK_THROWS_AS(
            attention_backward(s, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, kernel),
            Error);
    };
    check_rejected({1, 16, 2, 2, 80, Format::BF16}, AttentionKernel::Hopper);
    check_rejected({1, 16, 2, 2, 64, Format::F32}, AttentionKernel::Hopper);
    if (!hopper()) check_rejected({1, 16, 2, 2, 64, Format::BF16}, AttentionKernel::Hopper);
}
