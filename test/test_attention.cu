// test_attention.cu - attention_forward and attention_backward on CUDA cores, on tensor cores and on Hopper, against the
// CPU reference. A tolerance is computed for every element from what the kernels round: p and ds to BF16 before
// they enter a tensor core, the result to BF16, and sums in FP32. See Bounds.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "../gpu/attention.cuh"
#include "gpu.h"

using namespace coat;

namespace {

using Buffer = test::Buffer<uint8_t>;

bool hopper() {
    int major = 0;
    return test::gpu_available() && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major == 9;
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

std::vector<float> random(Format f, size_t n, Inputs kind, uint64_t seed) {
    std::mt19937_64 bits(seed);
    std::normal_distribution<float> normal;
    std::student_t_distribution<float> heavy(2.0f);
    std::vector<float> x(n);
    for (float& v : x) {
        v = kind == Inputs::HeavyTails ? heavy(bits) : normal(bits) * (kind == Inputs::LargeLogits ? 30.0f : 1.0f);
        v = reference::round_to(f, std::clamp(v, -1e4f, 1e4f));
    }
    return x;
}

// For every element of the outputs, the sum of the magnitudes of the terms it is made of, each already widened by how far its factors can
// be off: an error of one term is a fraction of that term, so a fraction of this sum bounds the whole.
struct Bounds {
    std::vector<double> out, lse, dqkv;
};

// Forward: out = sum p v / sum p.      |error| <= (u + 2 e) sum p |v|
// Backward: dv = sum p dout:           |error| <= (u + e) sum p |dout|
//           ds = p (dp - delta):       |error| <= (2 u + e) |ds| + p sums of |dout v| + |dout out|, then times |k| or |q| and 1/sqrt(HS)
// u: rounding of p, and then of ds, to BF16, half a unit in the last of 8 places; 0 for fp32.
// e: relative error of exp(s - max) and exp(s - lse): FP32 rounding of s, of its scaling and of the exponent, a few 2^-24 of the terms'
// magnitudes in s, and 2^-21 for the fast exponential, which flushes what is below 2^-126. The sums themselves: 2^-24 a term at worst.
Bounds bounds(const AttentionShape& s, const std::vector<float>& qkv, const std::vector<float>& out, const std::vector<float>& dout) {
    Bounds r{std::vector<double>(out.size()), std::vector<double>(s.B * s.NH * s.T), std::vector<double>(qkv.size())};
    const double scale = 1 / std::sqrt(double(s.HS)), u = s.format == Format::BF16 ? 0x1p-8 : 0, sums = (s.T + s.HS) * 0x1p-24;
    const int64_t cols = s.qkv_cols(), HS = s.HS;
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t kv = 0; kv < s.NKV; kv++)
            for (int64_t h = kv * (s.NH / s.NKV); h < (kv + 1) * (s.NH / s.NKV); h++)
                for (int64_t t = 0; t < s.T; t++) {
                    const int64_t kcol = (s.NH + kv) * HS, vcol = kcol + s.NKV * HS, qrow = (b * s.T + t) * cols + h * HS;
                    const int64_t orow = ((b * s.T + t) * s.NH + h) * HS;
                    std::vector<double> p(t + 1), e(t + 1);
                    double max = -INFINITY, sum = 0, worst = 0, delta = 0, delta_size = 0;
                    for (int64_t j = 0; j <= t; j++) {
                        double dot = 0, size = 0;
                        for (int64_t i = 0; i < HS; i++) {
                            const double x = double(qkv[qrow + i]) * qkv[(b * s.T + j) * cols + kcol + i];
                            dot += x, size += std::abs(x);
                        }
                        p[j] = dot * scale, e[j] = 0x1p-21 + size * scale * (HS * 0.5 + 8) * 0x1p-24;
                        max = std::max(max, p[j]), worst = std::max(worst, e[j]);
                    }
                    for (double& x : p) sum += x = std::exp(x - max);
                    for (double& x : p) x /= sum;
                    r.lse[(b * s.NH + h) * s.T + t] = worst + sums + std::abs(max) * 0x1p-22;
                    for (int64_t i = 0; i < HS; i++) {
                        delta += double(dout[orow + i]) * out[orow + i], delta_size += std::abs(double(dout[orow + i]) * out[orow + i]);
                    }
                    for (int64_t j = 0; j <= t; j++) {
                        const int64_t row = (b * s.T + j) * cols;
                        double dp = 0, size = delta_size;
                        for (int64_t i = 0; i < HS; i++) {
                            const double x = double(dout[orow + i]) * qkv[row + vcol + i];
                            dp += x, size += std::abs(x);
                        }
                        const double rel = e[j] + worst + sums + std::abs(max) * 0x1p-21;  // of p made from s and the saved lse
                        const double p_error = p[j] * (u + rel + sums) + 0x1p-126;
                        const double ds_error = scale * ((p_error + p[j] * u) * std::abs(dp - delta) + p[j] * (1 + rel) * size * (HS + 8) * 0x1p-24);
                        for (int64_t i = 0; i < HS; i++) {
                            r.out[orow + i] += p_error * std::abs(qkv[row + vcol + i]);
                            r.dqkv[row + vcol + i] += p_error * std::abs(dout[orow + i]);
                            r.dqkv[row + kcol + i] += ds_error * std::abs(qkv[qrow + i]);
                            r.dqkv[qrow + i] += ds_error * std::abs(qkv[row + kcol + i]);
                        }
                    }
                }
    return r;
}

// Every element is finite and within its bound plus the rounding of the result to its format.
void check_close(const std::string& what, Format f, const std::vector<float>& got, const std::vector<float>& want, const std::vector<double>& bound) {
    REQUIRE(got.size() == want.size());
    int64_t wrong = 0;
    double worst = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double half_ulp = (f == Format::BF16 ? 0x1p-8 : 0x1p-22) * std::abs(want[i]);  // ours, and where it would round the other way
        const double limit = bound[i] + half_ulp + 1e-37, error = std::abs(double(got[i]) - want[i]);
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

// Forward, then backward from the given out and lse rather than its own, so that the two are judged apart.
Run run(const AttentionShape& s, AttentionKernel kernel, const std::vector<float>& qkv, const std::vector<float>& out,
        const std::vector<float>& lse, const std::vector<float>& dout) {
    const Buffer in(pack(s.format, qkv)), o(pack(s.format, out)), l(pack(Format::F32, lse)), g(pack(s.format, dout));
    const Buffer to(int64_t(pack(s.format, out).size())), to_lse(int64_t(lse.size() * 4)), grad(int64_t(pack(s.format, qkv).size()));
    const Buffer workspace(int64_t(attention_workspace(s)));
    attention_forward(s, in.get(), to.get(), reinterpret_cast<float*>(to_lse.get()), nullptr, kernel);
    attention_backward(s, in.get(), o.get(), reinterpret_cast<const float*>(l.get()), g.get(), grad.get(), workspace.get(), nullptr, kernel);
    test::succeeded(cudaDeviceSynchronize());
    CHECK(to.intact());
    CHECK(to_lse.intact());
    CHECK(grad.intact());
    CHECK(workspace.intact());
    return {to.read(), to_lse.read(), grad.read()};
}

ModelConfig config(const AttentionShape& s) {
    ModelConfig c{"test", LLAMA, 1, s.NH * s.HS, s.NH, s.NKV, 16, 16, s.T, true};
    c.head_size = s.HS;
    return c;
}

void check(const AttentionShape& s, AttentionKernel kernel, Inputs kind = Inputs::Normal, uint64_t seed = std::random_device{}()) {
    INFO("B " << s.B << " T " << s.T << " NH " << s.NH << " NKV " << s.NKV << " HS " << s.HS << " " << std::string(info(s.format).name) << " kernel "
              << int(kernel) << " seed " << seed);
    const size_t rows = s.B * s.T;
    const std::vector<float> qkv = random(s.format, rows * s.qkv_cols(), kind, seed);
    const std::vector<float> dout = random(s.format, rows * s.NH * s.HS, kind == Inputs::LargeLogits ? Inputs::Normal : kind, seed + 1);
    std::vector<float> out(dout.size()), lse(s.B * s.NH * s.T), dqkv(qkv.size());
    reference::attention_forward(config(s), s.B, s.T, qkv.data(), out.data(), lse.data());
    const std::vector<float> exact_out = out;
    for (float& x : out) x = reference::round_to(s.format, x);
    reference::attention_backward(config(s), s.B, s.T, qkv.data(), out.data(), lse.data(), dout.data(), dqkv.data());

    const Run first = run(s, kernel, qkv, out, lse, dout);
    const Bounds limit = bounds(s, qkv, out, dout);
    check_close("out", s.format, unpack(s.format, first.out), exact_out, limit.out);
    check_close("lse", Format::F32, unpack(Format::F32, first.lse), lse, limit.lse);
    check_close("dqkv", s.format, unpack(s.format, first.dqkv), dqkv, limit.dqkv);
    CHECK(first == run(s, kernel, qkv, out, lse, dout));
}

// Round sizes, tails, one token; every way of sharing key/value heads. Short enough for a sanitizer, under which a launch takes seconds.
void check_short(Format f, int64_t HS, AttentionKernel kernel) {
    for (int64_t T : {1, 17, 70}) check({1, T, 4, 2, HS, f}, kernel);
    for (int64_t NKV : {4, 1}) check({1, 24, 4, NKV, HS, f}, kernel);
}

// Several tiles and sequences.
void check_long(Format f, int64_t HS, AttentionKernel kernel) {
    for (int64_t T : {64, 100, 128, 257}) check({2, T, 4, 2, HS, f}, kernel);
    for (int64_t NKV : {8, 2, 1}) check({1, 200, 8, NKV, HS, f}, kernel);
    check({1, 1024, 2, 1, HS, f}, kernel);
    for (Inputs kind : {Inputs::HeavyTails, Inputs::LargeLogits}) check({1, 300, 2, 2, HS, f}, kernel, kind);
}

// Every head size and format that goes to the kernel on CUDA cores.
void check_on_cuda_cores(void (*check_sizes)(Format, int64_t, AttentionKernel)) {
    for (int64_t HS : {8, 32, 80, 128, 256}) check_sizes(Format::F32, HS, AttentionKernel::Best);
    for (int64_t HS : {32, 80, 256}) check_sizes(Format::BF16, HS, AttentionKernel::Best);
    check_sizes(Format::BF16, 64, AttentionKernel::Simple);
}

}  // namespace

GPU_TEST_CASE("attention_forward and attention_backward on CUDA cores: fp32 and bf16, many head sizes") { check_on_cuda_cores(check_short); }
GPU_TEST_CASE("long attention_forward and attention_backward on CUDA cores: fp32 and bf16, many head sizes") { check_on_cuda_cores(check_long); }

GPU_TEST_CASE("attention_forward and attention_backward on tensor cores: head sizes 64 and 128") {
    for (auto check_sizes : {check_short, check_long})
        for (int64_t HS : {64, 128}) check_sizes(Format::BF16, HS, AttentionKernel::TensorCores);
}

TEST_CASE("gpu: attention_forward and attention_backward on Hopper: head sizes 64 and 128" * doctest::skip(!hopper())) {
    for (auto check_sizes : {check_short, check_long})
        for (int64_t HS : {64, 128}) check_sizes(Format::BF16, HS, AttentionKernel::Hopper);
}

GPU_TEST_CASE("attention_forward: unsupported head sizes are rejected") {
    for (int64_t HS : {4, 264})
        CHECK_THROWS_AS(attention_forward({1, 16, 2, 2, HS, Format::BF16}, nullptr, nullptr, nullptr, nullptr), Error);
    auto refused = [](const AttentionShape& s, AttentionKernel kernel) {
        CHECK_THROWS_AS(attention_forward(s, nullptr, nullptr, nullptr, nullptr, kernel), Error);
        CHECK_THROWS_AS(attention_backward(s, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, kernel), Error);
    };
    for (AttentionKernel kernel : {AttentionKernel::TensorCores, AttentionKernel::Hopper}) {  // asked for by name
        refused({1, 16, 2, 2, 80, Format::BF16}, kernel);
        refused({1, 16, 2, 2, 64, Format::F32}, kernel);
    }
    if (!hopper()) refused({1, 16, 2, 2, 64, Format::BF16}, AttentionKernel::Hopper);
}
