// gpu.h - what the tests of kernels share: tensors on the device in any format, and two comparisons.
//
// A kernel is checked in two steps. Its FP32 values are compared with the reference in double. The same
// reference in float shows how much FP32 loses, and the kernel may lose SLACK times as much (check_as_float).
// Then its codes and scales are compared, byte for byte, with the reference's quantization of those FP32
// values (check_quantized). The tests of GEMMs and attention have bounds of their own (check_within).
//
// GPU_TEST_CASE("name") is the test "gpu: name", which is skipped where there is no GPU.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "../../coat.h"
#include "../../gpu/column_sums.h"
#include "../../gpu/gpu_model.h"
#include "../../gpu/layers.h"
#include "../../gpu/norm.h"
#include "../../gpu/other_scaling.h"
#include "../../gpu/gradient_norm.h"
#include "../../gpu/initialize.h"
#include "../../reference/operators.h"
#include "../../reference/optimizer.h"
#include "../../dev/device_buffer.h"
#include "random.h"

namespace coat::test {

using gpu::LazyTensor;
using gpu::Operand;
using gpu::TensorRef;
using gpu::TensorScale;
using Bytes = std::vector<uint8_t>;

inline bool gpu_available() {
    static const bool available = select_gpu().empty();
    return available;
}
#define GPU_TEST_CASE(name) TEST_CASE("gpu: " name* doctest::skip(!coat::test::gpu_available()))

// An array in device memory. At its end a test checks that no kernel has written behind it.
template <class T> class Buffer : public dev::DeviceBuffer<T> {
public:
    explicit Buffer(int64_t n) : dev::DeviceBuffer<T>(size_t(n)) {}
    explicit Buffer(const std::vector<T>& host) : dev::DeviceBuffer<T>(host) {}
    ~Buffer() { CHECK(this->guard_is_unchanged()); }
    void zero() { this->fill(0); }
};

template <class T> bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
// Equal bytes, but for NaN: GPUs and CPUs write the same NaN with another sign and other bits.
inline bool same_values(const Floats& a, const Floats& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
        return std::isnan(x) ? std::isnan(y) : std::memcmp(&x, &y, sizeof x) == 0;
    });
}
template <class T> std::vector<T> transposed(const std::vector<T>& x, int64_t rows, int64_t cols) {
    std::vector<T> t(x.size());
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) t[c * rows + r] = x[r * cols + c];
    return t;
}

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
    for (float& v : x) v = float(rng.normal() * (rng.below(50) == 0 ? 30 : 1) * std::exp(rng.normal()));
    return rounded(f, x);
}

inline Bytes bytes_of(const Floats& x) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(x.data());
    return Bytes(bytes, bytes + x.size() * sizeof(float));
}
// Scales as they lie in memory; none for a scale per tensor, which lies elsewhere. Blocks are as cuBLASLt
// reads them (its manual: "128-element 1D and 128x128 2D Block Scaling"): 1x128 scales are transposed, so
// that neighbours belong to neighbouring rows; each row of 128x128 scales is padded to a multiple of four,
// and the kernels fill the padding with 1.
inline Bytes stored_scales(const reference::StoredMatrix& q) {
    const Granularity& g = q.format.granularity;
    if (g == PER_TENSOR) return {};
    if (g.cols != 128) return q.scales;
    const int64_t rows = q.format.rows_of_scales(q.rows), cols = q.format.cols_of_scales(q.cols);
    const int64_t padded = g.rows == 1 ? cols : round_up(cols, 4);
    Floats to(rows * padded, 1.0f);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            to[g.rows == 1 ? c * rows + r : r * padded + c] = q.scale(r * g.rows, c * g.cols);
    return bytes_of(to);
}

struct Shape {
    int64_t rows, cols;
    int64_t n() const { return rows * cols; }
};

// A tensor on the device in any format, as kernels store it: row-major, and also transposed for GEMMs.
class Tensor {
public:
    const int64_t rows, cols;
    const TensorFormat format;
    Buffer<uint8_t> codes, transposed, scales, transposed_scales;
    Buffer<TensorScale> tensor_scale;  // of the whole tensor; in groups and blocks only the amax
    const bool delayed_scaling;

    // A tensor without values, for a kernel to write: all bytes are 0xFF. delayed: the scale that delayed
    // scaling gives it; 0: its scales are just-in-time.
    Tensor(Shape s, TensorFormat q, float delayed = 0)
        : rows(s.rows), cols(s.cols), format(q), codes(q.bytes_without_scales(rows, cols)),
          transposed(transposes() ? q.bytes_without_scales(rows, cols) : 0),
          scales(
              std::max(per_tensor() ? 0 : q.scale_count(rows, cols), gpu::block_scale_count(q, rows, cols)) *
              format_info(q.scale_format).bytes),
          transposed_scales(transposes() ? gpu::block_scale_count(q, cols, rows) * 4 : 0), tensor_scale(1),
          delayed_scaling(delayed > 0) {
        tensor_scale.write({TensorScale{0, 0, delayed}});
    }
    // x (rows, cols) as the reference stores it.
    Tensor(const Floats& x, Shape s, TensorFormat q) : Tensor(s, q) {
        for (bool transpose : {false, true}) {
            if (transpose && !transposes()) continue;
            const reference::StoredMatrix from = quantized(x, transpose);
            (transpose ? transposed : codes).write(from.elements);
            (transpose ? transposed_scales : scales).write(stored_scales(from));
            if (per_tensor()) tensor_scale.write({TensorScale{from.scale(0, 0), 0, 0}});
        }
    }
    // A vector without scales.
    Tensor(const Floats& x, Format f) : Tensor(x, {1, int64_t(x.size())}, TensorFormat{f}) {}

    // Whether all elements share one scale; whether GEMMs read it; whether kernels store its transpose, too.
    bool per_tensor() const { return format.is_fp8() && format.granularity == PER_TENSOR; }
    bool for_gemm() const { return format.is_fp8() && format.granularity != PER_1x16; }
    bool transposes() const { return for_gemm() && rows % 16 == 0; }
    TensorRef ref() const {
        TensorRef t{.data = codes.get(), .rows = rows, .cols = cols, .format = format};
        if (for_gemm()) t.tensor_scale = tensor_scale.get();
        if (format == E4M3_PER_1x16) t.group_scales = reinterpret_cast<uint16_t*>(scales.get());
        return t;
    }
    Operand operand() const {
        Operand out{.tensor = ref(), .delayed = delayed_scaling};
        if (transposes()) out.transposed = transposed.get();
        if (!for_gemm() || per_tensor()) return out;
        out.block_scales = reinterpret_cast<float*>(scales.get());
        if (transposes()) out.transposed_block_scales = reinterpret_cast<float*>(transposed_scales.get());
        return out;
    }
    // Where a kernel leaves the amax of the tensor.
    float* amax_to_raise() const { return &tensor_scale.get()->amax; }
    float amax() const { return tensor_scale.read()[0].amax; }
    float scale() const { return tensor_scale.read()[0].scale; }
    Floats values() const {  // of all formats but those in blocks
        return reference::dequantize(
            {codes.read(), per_tensor() ? bytes_of({scale()}) : scales.read(), rows, cols, format});
    }
    template <class Real> std::vector<Real> as() const {
        const Floats x = values();
        return {x.begin(), x.end()};
    }
    // The codes and scales of x (rows, cols), row-major or transposed.
    reference::StoredMatrix quantized(const Floats& x, bool transpose,
                                      std::optional<float> delayed = {}) const {
        if (!transpose) return reference::quantize(x.data(), rows, cols, format, {.scale = delayed});
        const Floats t = test::transposed(x, rows, cols);
        return reference::quantize(t.data(), cols, rows, format, {.scale = delayed});
    }
};

// Equal codes; the several NaN codes of a format count as equal.
inline bool same_codes(Format f, const Bytes& a, const Bytes& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [f](uint8_t x, uint8_t y) {
        return x == y || (std::isnan(reference::decode(f, x)) && std::isnan(reference::decode(f, y)));
    });
}

// Codes and scales in both orientations, and the amax, against the reference, just in time or delayed.
inline void check_quantized(const Tensor& out, const Floats& x, std::optional<float> delayed = {}) {
    INFO(out.format.text(), " ", out.rows, "x", out.cols);
    for (bool transpose : {false, true}) {
        if (transpose && !out.transposes()) continue;
        const reference::StoredMatrix wanted = out.quantized(x, transpose, delayed);
        const Bytes codes = (transpose ? out.transposed : out.codes).read();
        CHECK((out.format.is_fp8() ? same_codes(out.format.element_format, codes, wanted.elements)
                                   : codes == wanted.elements));
        CHECK(same_bytes((transpose ? out.transposed_scales : out.scales).read(), stored_scales(wanted)));
    }
    if (!out.for_gemm()) return;
    const float amax = reference::compute_amax(x.data(), out.rows * out.cols), got = out.amax();
    CHECK((got == amax || (!std::isfinite(got) && !std::isfinite(amax))));
    if (out.per_tensor()) CHECK(out.scale() == (delayed ? *delayed : reference::scale_of(out.format, amax)));
}

// How many values are farther from the exact ones than bounds, one for each value, allow. Both limits of a
// value are rounded by stored(i, x).
template <class Rounding>
int64_t count_outside(const Floats& got, const Doubles& exact, const Doubles& bounds, Rounding stored) {
    int64_t wrong = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const auto low = stored(i, exact[i] - bounds[i]), high = stored(i, exact[i] + bounds[i]);
        if (low <= got[i] && got[i] <= high) continue;
        if (wrong++ == 0) MESSAGE("element ", i, " is ", got[i], ", expected ", low, " to ", high);
    }
    return wrong;
}
template <class Rounding>
void check_within(const Floats& got, const Doubles& exact, const Doubles& bounds, Rounding stored) {
    REQUIRE(got.size() == exact.size());
    CHECK(count_outside(got, exact, bounds, stored) == 0);
}
inline void check_within(const Floats& got, const Doubles& exact, const Doubles& bounds) {
    check_within(got, exact, bounds, [](size_t, double x) { return x; });
}

// How far the FP32 values of a kernel may be from the exact ones. In each row of `cols` values, the reference
// in float shows how much FP32 loses. A kernel adds in another order and has faster functions: it may lose
// SLACK times as much, with as many roundings U of the row's largest value. terms: for each value the largest
// magnitude of what is added up to it, where that may cancel in a whole row; or none.
constexpr double SLACK = 32, U = 0x1p-24;
inline Doubles bounds_as_float(const Doubles& exact, const Floats& in_float, int64_t cols,
                               const Doubles& terms = {}) {
    Doubles bounds;
    while (bounds.size() < exact.size()) {
        const size_t first = bounds.size(), last = std::min(exact.size(), first + size_t(cols));
        double lost = 0, largest = 0;
        for (size_t i = first; i < last; i++) {
            if (std::isfinite(in_float[i])) lost = std::max(lost, std::abs(in_float[i] - exact[i]));
            largest = std::max(largest, std::abs(exact[i]));
        }
        for (size_t i = first; i < last; i++) {
            const double size = terms.empty() ? largest : std::max(largest, terms[i]);
            bounds.push_back(SLACK * (lost + U * size) + 0x1p-126);
        }
    }
    return bounds;
}
// Compares with these bounds. Rounding to what is stored, stored(i, x), is monotone, so the result lies
// between the limits of the value, rounded.
template <class Rounding>
void check_limits(const Floats& got, const Doubles& exact, const Floats& in_float, int64_t cols,
                  Rounding stored, const Doubles& terms = {}) {
    check_within(got, exact, bounds_as_float(exact, in_float, cols, terms), stored);
}
inline void check_as_float(const Floats& got, const Doubles& exact, const Floats& in_float, int64_t cols,
                           Format stored = Format::FP32, const Doubles& terms = {}) {
    const auto round = [&](size_t, float x) { return reference::round_to(stored, x); };
    check_limits(got, exact, in_float, cols, round, terms);
}

// Under a sanitizer a launch takes seconds, so large shapes are left out; others have several tiles too.
inline std::vector<Shape> shapes(const std::vector<Shape>& all) {
    std::vector<Shape> chosen;
    std::copy_if(all.begin(), all.end(), std::back_inserter(chosen),
                 [](const Shape& s) { return !quick() || s.n() <= 1 << 16; });
    return chosen;
}

// A recipe's compute format, and the format in which it saves the inputs of norms and activations.
struct RecipeFormats {
    Format compute;
    TensorFormat saved_inputs;
};
inline const RecipeFormats RECIPE_FORMATS[] = {
    {Format::BF16, E4M3_PER_1x16}, {Format::BF16, PLAIN_BF16}, {Format::FP32, PLAIN_FP32}};

constexpr TensorFormat ROW_E5M2{Format::E5M2, PER_ROW}, B1x128_E5M2{Format::E5M2, PER_1x128},
    B128x128_E5M2{Format::E5M2, PER_128x128};
constexpr TensorFormat GEMM_FORMATS[] = {E4M3_PER_TENSOR,  E5M2_PER_TENSOR, E4M3_PER_ROW, E4M3_PER_1x128,
                                         E4M3_PER_128x128, ROW_E5M2,        B1x128_E5M2,  B128x128_E5M2};

// Sums of rows: `before` + the sum over i of row i of x in row row_of(i).
template <class RowOf>
void check_row_sums(const Tensor& got, const Floats& before, const Floats& x, RowOf row_of) {
    Doubles exact = doubles(before);
    Floats in_float = before;
    for (int64_t i = 0; i < int64_t(x.size()); i++) {
        const int64_t at = row_of(i / got.cols) * got.cols + i % got.cols;
        exact[at] += x[i];
        in_float[at] += x[i];
    }
    check_as_float(got.values(), exact, in_float, got.cols, got.format.element_format);
}

// Column sums of x, whose FP32 values are given, added to 0.5.
inline void check_column_sums(const LazyTensor& x, const Floats& values) {
    const Floats before(x.cols, 0.5f);
    for (bool with_amax : {true, false}) {
        const Tensor sums(before, Format::FP32);
        const Buffer<float> workspace(gpu::COLUMN_PARTIALS * x.cols);
        gpu::add_column_sums(x, sums.ref(), workspace.get(), with_amax ? sums.amax_to_raise() : nullptr, 0);
        CHECK(sums.amax() == (with_amax ? reference::compute_amax(values.data(), x.rows * x.cols) : 0));
        check_row_sums(sums, before, values, [](int64_t) { return 0; });
    }
}

// A lazily computed tensor: its FP32 values against the exact ones; then what is made of it against these
// values: BF16, column sums, and codes and scales in every format and orientation, delayed too.
inline void check_lazy(const LazyTensor& x, Format compute, const Doubles& exact, const Floats& in_float) {
    const Shape s{x.rows, x.cols};
    const Tensor fp32(s, PLAIN_FP32), bf16(s, PLAIN_BF16);
    gpu::write_values(x, fp32.ref(), 0);
    const Floats values = fp32.values();
    check_as_float(values, exact, in_float, s.cols);
    check_column_sums(x, values);
    if (compute == Format::FP32) {
        CHECK_THROWS_AS(gpu::compute_amax(x, bf16.amax_to_raise(), 0), Error);
        return;
    }
    gpu::write_values(x, bf16.ref(), 0);
    check_quantized(bf16, values);
    for (TensorFormat q : GEMM_FORMATS) {
        const bool per_tensor = q.granularity == PER_TENSOR;
        const Tensor both(s, q), row_major(s, q), column_major(s, q);
        for (const Tensor* t : {&both, &row_major, &column_major}) {
            Operand out = t->operand();
            if (t == &row_major) out.transposed = nullptr;
            if (t == &column_major) out.tensor.data = nullptr;
            if (per_tensor) gpu::compute_amax(x, t->amax_to_raise(), 0);
            gpu::quantize_operand(x, out, nullptr, 0);
        }
        check_quantized(both, values);
        CHECK(same_bytes(row_major.codes.read(), both.codes.read()));
        CHECK(same_bytes(row_major.scales.read(), both.scales.read()));
        CHECK(same_bytes(column_major.transposed.read(), both.transposed.read()));
        CHECK(same_bytes(column_major.transposed_scales.read(), both.transposed_scales.read()));
        if (!per_tensor) continue;
        // half of the amax: some values saturate
        const float scale = reference::scale_of(q, reference::compute_amax(values.data(), s.n()) / 2);
        const Tensor delayed(s, q, scale);
        gpu::quantize_operand(x, delayed.operand(), nullptr, 0);
        check_quantized(delayed, values, scale);
    }
}

}  // namespace coat::test
