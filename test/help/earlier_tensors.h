// earlier_tensors.h - tensors on the device and comparisons with bounds, for the tests of kernels.
//
// Where a kernel sums or takes powers in FP32, its result is compared with a result in double. The allowed
// error of every element follows from the rounding errors of the formats. u = 2^-24 is the relative rounding
// error of FP32.
#pragma once
#include <cmath>

#include "../../gpu/tensor.cuh"
#include "earlier_gpu.h"
#include "random.h"

namespace coat::test::device_tensors {

using gpu::AmaxAndScale;
using gpu::Operand;
using gpu::View;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Bytes = std::vector<uint8_t>;

inline constexpr double U = 0x1p-24;

// The relative rounding error of a format.
inline double half_ulp(Format f) { return std::ldexp(1.0, -info(f).mantissa - 1); }

// A tensor on the device. FP8 with one scale per tensor has a transposed copy of the codes too.
class Tensor {
public:
    Tensor(int64_t rows, int64_t cols, Quant q)
        : codes(q.code_bytes(rows, cols)),
          scales(per_tensor(q) ? sizeof(AmaxAndScale) : q.scales(rows, cols) * info(q.scale_format).bytes),
          transposed(per_tensor(q) ? rows * cols : 0), quant_(q), rows_(rows), cols_(cols) {
        if (per_tensor(q)) scales.zero();
    }
    Tensor(const Floats& x, int64_t rows, int64_t cols, Quant q) : Tensor(rows, cols, q) {
        reference::Quantized quantized = reference::quantize(x.data(), rows, cols, q);
        codes.write(quantized.codes);
        scales.write(quantized.scales);
    }
    Tensor(const Floats& x, Format f) : Tensor(x, 1, static_cast<int64_t>(x.size()), Quant{f}) {}

    View view() const { return {codes.get(), scales.get(), rows_, cols_, quant_}; }
    Operand operand() const { return {view(), per_tensor(quant_) ? transposed.get() : nullptr}; }
    AmaxAndScale* amax_and_scale() const { return gpu::amax_and_scale(view()); }
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
    static bool per_tensor(Quant q) { return q.fp8() && q.granularity == PER_TENSOR; }
    AmaxAndScale header() const {
        AmaxAndScale s;
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
inline Floats normals(Random& rng, Format f, int64_t n, double std = 1) {
    return rounded(f, rng.normals<float>(n, std));
}

// Values distributed like activations: heavy tails, and one in 50 is an outlier.
inline Floats heavy(Random& rng, Format f, int64_t n) {
    Floats x(n);
    for (float& v : x)
        v = static_cast<float>(rng.normal() * (rng.below(50) == 0 ? 30 : 1) * std::exp(rng.normal()));
    return rounded(f, x);
}

inline bool nan_code(Format f, uint8_t c) { return std::isnan(reference::decode(f, c)); }
// Equal codes; the several NaN codes of a format count as equal.
inline bool same_codes(Format f, const Bytes& a, const Bytes& b) {
    for (size_t i = 0; i < a.size(); i++)
        if (a[i] != b[i] && !(nan_code(f, a[i]) && nan_code(f, b[i]))) return false;
    return a.size() == b.size();
}

// Checks |a - b| <= bound for every element; a message shows the first element that fails.
inline void check_close(const Floats& a, const Doubles& b, const Doubles& bound) {
    REQUIRE(a.size() == b.size());
    int64_t bad = 0, first = -1;
    for (size_t i = 0; i < a.size(); i++)
        if (!(std::abs(a[i] - b[i]) <= bound[i]) && bad++ == 0) first = static_cast<int64_t>(i);
    CHECK(bad == 0);
    if (bad)
        MESSAGE(bad, " of ", a.size(), " elements differ. Element ", first, " is ", a[first], ", expected ",
                b[first], " +- ", bound[first]);
}

struct Shape {
    int64_t rows, cols;
};
inline const Shape SHAPES[] = {{1, 16},    {7, 48},    {16, 128},  {100, 112},
                               {129, 144}, {128, 256}, {257, 400}, {512, 1024}};
// Under a sanitizer a launch takes seconds, so large shapes are skipped; smaller ones have several tiles and
// rows too.
inline bool too_long(int64_t elements) { return quick() && elements > 1 << 16; }
inline const Quant FP8_OUTPUTS[] = {Q_E4M3, Q_E5M2};

// A recipe's compute dtype, and the format in which it saves the inputs of norms and activations for
// backward.
struct RecipeFormats {
    Format compute;
    Quant nonlinear;
};
inline const RecipeFormats RECIPE_FORMATS[] = {
    {Format::BF16, Q_GROUP}, {Format::BF16, Q_BF16}, {Format::F32, Q_F32}};

// A norm with random parameters: its result in double, and how far a kernel may differ from it.
struct NormCase {
    Tensor in, weight, bias;
    Buffer<float2> stats;
    bool rms;
    int64_t N, C;
    static constexpr float EPS = 1e-5f;

    NormCase(Random& rng, RecipeFormats formats, bool rms, int64_t N, int64_t C)
        : in(N, C, formats.nonlinear), weight(normals(rng, formats.compute, C), formats.compute),
          bias(normals(rng, formats.compute, C), formats.compute), stats(N), rms(rms), N(N), C(C) {}
    gpu::Norm norm() const {
        return {in.view(), weight.codes.get(), rms ? nullptr : bias.codes.get(), stats.get(), rms, EPS};
    }
    Doubles forward(const Doubles& x) const {
        Doubles y(N * C);
        const Doubles w = doubles(weight.values()), b = doubles(bias.values());
        reference::norm_forward<double>(rms, EPS, N, C, x.data(), w.data(), rms ? nullptr : b.data(),
                                        y.data());
        return y;
    }
    // The error of y = (x - mean) / std * w + b. A thread adds at most 32 values, and then 5 + 16 partial
    // sums follow, so a sum is good to 53 u of the sum of magnitudes, and the root of a mean square to half
    // of that. The error of the mean is relative to the mean magnitude of x. Five more roundings follow; 64 u
    // covers all of it.
    Doubles bound(const Doubles& x, const Doubles& y) const {
        const Floats w = weight.values(), b = bias.values();
        Doubles out(N * C);
        for (int64_t n = 0; n < N; n++) {
            double mean = 0, magnitude = 0, square = 0;
            for (int64_t c = 0; c < C; c++) mean += x[n * C + c] / C, magnitude += std::abs(x[n * C + c]) / C;
            if (rms) mean = 0;
            for (int64_t c = 0; c < C; c++) square += (x[n * C + c] - mean) * (x[n * C + c] - mean) / C;
            const double inverse = 1 / std::sqrt(square + EPS);
            for (int64_t c = 0; c < C; c++) {
                const double deviation = std::abs(x[n * C + c] - mean) + (rms ? 0 : 2 * magnitude);
                const double shift = rms ? 0 : std::abs(b[c]);
                out[n * C + c] =
                    64 * U * (std::abs(w[c]) * inverse * deviation + shift + std::abs(y[n * C + c]));
            }
        }
        return out;
    }
};

// The value of a code of FP16 or FP8.
inline double decode_any(Format f, int code) { return reference::decode(f, static_cast<uint16_t>(code)); }

}  // namespace coat::test::device_tensors
