// device_tensors.h - tensors on the device and comparisons with bounds, for the tests of kernels.
//
// Where a kernel sums or takes powers in FP32, its result is compared with double. The bound is worked out for every
// element from the formats. u = 2^-24 is half a unit in the last place of FP32.
#pragma once
#include <cmath>

#include "../gpu/tensor.cuh"
#include "gpu.h"
#include "random.h"

namespace coat::test::device_tensors {

using gpu::Operand;
using gpu::TensorScale;
using gpu::View;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Bytes = std::vector<uint8_t>;

inline constexpr double U = 0x1p-24;

inline double half_ulp(Format f) { return std::ldexp(1.0, -info(f).mantissa - 1); }  // relative

// A tensor on the device, and its transpose if it is FP8 with one scale.
class Tensor {
public:
    Tensor(int64_t rows, int64_t cols, Quant q)
        : codes(q.code_bytes(rows, cols)), scales(whole(q) ? sizeof(TensorScale) : q.scales(rows, cols) * info(q.scale).bytes),
          transposed(whole(q) ? rows * cols : 0), quant_(q), rows_(rows), cols_(cols) {
        if (whole(q)) scales.zero();
    }
    Tensor(const Floats& x, int64_t rows, int64_t cols, Quant q) : Tensor(rows, cols, q) {
        reference::Quantized quantized = reference::quantize(x.data(), rows, cols, q);
        codes.write(quantized.codes);
        scales.write(quantized.scales);
    }
    Tensor(const Floats& x, Format f) : Tensor(x, 1, static_cast<int64_t>(x.size()), Quant{f}) {}

    View view() const { return {codes.get(), scales.get(), rows_, cols_, quant_}; }
    Operand operand() const { return {view(), whole(quant_) ? transposed.get() : nullptr}; }
    TensorScale* slot() const { return gpu::tensor_scale(view()); }
    float amax() const { return header().amax; }
    float scale() const { return header().scale; }
    Floats values() const {
        reference::Quantized q;
        q.codes = codes.read(), q.scales = scales.read(), q.rows = rows_, q.cols = cols_, q.quant = quant_;
        return reference::dequantize(q);
    }
    bool intact() const { return codes.intact() && scales.intact() && transposed.intact(); }

    Buffer<uint8_t> codes, scales, transposed;

private:
    static bool whole(Quant q) { return q.fp8() && q.granularity == PER_TENSOR; }
    TensorScale header() const {
        TensorScale s;
        const Bytes bytes = scales.read();
        std::memcpy(&s, bytes.data(), sizeof s);
        return s;
    }
    Quant quant_;
    int64_t rows_, cols_;
};

inline Floats rounded(Format f, Floats x) {
    for (float& v : x) v = reference::round_to(f, v);
    return x;
}
inline Doubles doubles(const Floats& x) { return Doubles(x.begin(), x.end()); }
inline Floats normals(Random& rng, Format f, int64_t n, double std = 1) { return rounded(f, rng.normals<float>(n, std)); }

// Like activations: normal, with a heavy tail and a few outliers.
inline Floats heavy(Random& rng, Format f, int64_t n) {
    Floats x(n);
    for (float& v : x) v = static_cast<float>(rng.normal() * (rng.below(50) == 0 ? 30 : 1) * std::exp(rng.normal()));
    return rounded(f, x);
}

inline bool nan_code(Format f, uint8_t c) { return std::isnan(reference::decode(f, c)); }
inline bool same_codes(Format f, const Bytes& a, const Bytes& b) {  // one NaN is as good as another
    for (size_t i = 0; i < a.size(); i++)
        if (a[i] != b[i] && !(nan_code(f, a[i]) && nan_code(f, b[i]))) return false;
    return a.size() == b.size();
}

// |a - b| <= bound for every element; a message names the worst.
inline void check_close(const Floats& a, const Doubles& b, const Doubles& bound) {
    REQUIRE(a.size() == b.size());
    int64_t bad = 0, worst = -1;
    for (size_t i = 0; i < a.size(); i++)
        if (!(std::abs(a[i] - b[i]) <= bound[i]) && bad++ == 0) worst = static_cast<int64_t>(i);
    CHECK(bad == 0);
    if (bad) MESSAGE("first of ", bad, " of ", a.size(), " at ", worst, ": ", a[worst], " instead of ", b[worst], ", bound ", bound[worst]);
}

struct Shape {
    int64_t rows, cols;
};
inline const Shape SHAPES[] = {{1, 16}, {7, 48}, {16, 128}, {100, 112}, {129, 144}, {128, 256}, {257, 400}, {512, 1024}};
// Under a sanitizer a launch takes seconds: what has several tiles or rows already is enough there.
inline bool too_long(int64_t elements) { return quick() && elements > 1 << 16; }
inline const Quant FP8_OUTPUTS[] = {Q_E4M3, Q_E5M2};

struct Pair {  // a recipe's stream and how it holds the inputs of norms and activations
    Format compute;
    Quant nonlinear;
};
inline const Pair PAIRS[] = {{Format::BF16, Q_GROUP}, {Format::BF16, Q_BF16}, {Format::F32, Q_F32}};

struct NormCase {
    Tensor in, weight, bias;
    Buffer<float2> stats;
    bool rms;
    int64_t N, C;
    static constexpr float EPS = 1e-5f;

    NormCase(Random& rng, Pair p, bool rms, int64_t N, int64_t C)
        : in(N, C, p.nonlinear), weight(normals(rng, p.compute, C), p.compute), bias(normals(rng, p.compute, C), p.compute), stats(N), rms(rms), N(N), C(C) {}
    gpu::Norm norm() const { return {in.view(), weight.codes.get(), rms ? nullptr : bias.codes.get(), stats.get(), rms, EPS}; }
    Doubles forward(const Doubles& x) const {
        Doubles y(N * C);
        const Doubles g = doubles(weight.values()), b = doubles(bias.values());
        reference::norm_forward<double>(rms, EPS, N, C, x.data(), g.data(), rms ? nullptr : b.data(), y.data());
        return y;
    }
    // A thread adds at most 32 numbers and then 5 + 16 more: sums are good to 53 u of the sum of magnitudes, the root of a mean
    // square to half of it, and five roundings follow. A mean comes with an error relative to the mean magnitude.
    Doubles bound(const Doubles& x, const Doubles& y) const {
        const Floats g = weight.values(), b = bias.values();
        Doubles out(N * C);
        for (int64_t n = 0; n < N; n++) {
            double mean = 0, magnitude = 0, square = 0;
            for (int64_t c = 0; c < C; c++) mean += x[n * C + c] / C, magnitude += std::abs(x[n * C + c]) / C;
            if (rms) mean = 0;
            for (int64_t c = 0; c < C; c++) square += (x[n * C + c] - mean) * (x[n * C + c] - mean) / C;
            const double inverse = 1 / std::sqrt(square + EPS);
            for (int64_t c = 0; c < C; c++)
                out[n * C + c] = 64 * U * (std::abs(g[c]) * inverse * (std::abs(x[n * C + c] - mean) + (rms ? 0 : 2 * magnitude)) +
                                           (rms ? 0 : std::abs(b[c])) + std::abs(y[n * C + c]));
        }
        return out;
    }
};

inline double decode_any(Format f, int code) { return f == Format::F16 ? reference::from_f16(static_cast<uint16_t>(code)) : reference::decode(f, static_cast<uint8_t>(code)); }

}  // namespace coat::test::device_tensors
