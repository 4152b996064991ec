// Every kernel of coat.cu against the CPU reference or, where sums and powers are taken in FP32, against double with a bound that is
// worked out for every element from the formats. u = 2^-24 is FP32's half unit in the last place.
//
// A fused kernel is checked in two steps: its FP32 values against double, and then its codes, byte for byte, against the
// reference's quantization of those very values. Outputs are poisoned first, and nobody may write behind them.
#include <cmath>
#include <memory>

#include "../coat.cuh"
#include "gpu.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using gpu::Computed;
using gpu::Operand;
using gpu::TensorScale;
using gpu::View;

namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Bytes = std::vector<uint8_t>;
constexpr double U = 0x1p-24;

double half_ulp(Format f) { return std::ldexp(1.0, -info(f).mantissa - 1); }  // relative

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

Floats rounded(Format f, Floats x) {
    for (float& v : x) v = reference::round_to(f, v);
    return x;
}
Doubles doubles(const Floats& x) { return Doubles(x.begin(), x.end()); }
Floats normals(Random& rng, Format f, int64_t n, double std = 1) { return rounded(f, rng.normals<float>(n, std)); }

// Like activations: normal, with a heavy tail and a few outliers.
Floats heavy(Random& rng, Format f, int64_t n) {
    Floats x(n);
    for (float& v : x) v = static_cast<float>(rng.normal() * (rng.below(50) == 0 ? 30 : 1) * std::exp(rng.normal()));
    return rounded(f, x);
}

bool nan_code(Format f, uint8_t c) { return std::isnan(reference::decode(f, c)); }
bool same_codes(Format f, const Bytes& a, const Bytes& b) {  // one NaN is as good as another
    for (size_t i = 0; i < a.size(); i++)
        if (a[i] != b[i] && !(nan_code(f, a[i]) && nan_code(f, b[i]))) return false;
    return a.size() == b.size();
}

// |a - b| <= bound for every element; a message names the worst.
void check_close(const Floats& a, const Doubles& b, const Doubles& bound) {
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
const Shape SHAPES[] = {{1, 16}, {7, 48}, {16, 128}, {100, 112}, {129, 144}, {128, 256}, {257, 400}, {512, 1024}};
// Under a sanitizer a launch takes seconds: what has several tiles or rows already is enough there.
bool too_long(int64_t elements) { return quick() && elements > 1 << 16; }
const Quant FP8_OUTPUTS[] = {Q_E4M3, Q_E5M2};

// Codes, scale and transpose of what a kernel quantized against the reference's quantization of the same values.
void check_quantized(const Tensor& out, const Floats& x, int64_t rows, int64_t cols, Quant q) {
    const reference::Quantized expected = reference::quantize(x.data(), rows, cols, q);
    CHECK(same_codes(q.format, out.codes.read(), expected.codes));
    CHECK(out.intact());
    if (q.granularity == PER_GROUP) {
        CHECK(same_bytes(out.scales.read(), expected.scales));
        return;
    }
    CHECK(out.scale() == expected.scale(0, 0));
    CHECK(same_codes(q.format, out.transposed.read(), transposed(expected.codes, rows, cols)));
}

// An operand whose scales are of rows, vectors or squares: both ways, each with scales of its own.
struct BlockOperand {
    Quant quant;
    int64_t rows, cols;
    Buffer<uint8_t> codes, transposed_codes;
    Buffer<float> scales, transposed_scales;
    Buffer<TensorScale> slot;

    BlockOperand(int64_t rows, int64_t cols, Quant q)
        : quant(q), rows(rows), cols(cols), codes(rows * cols), transposed_codes(rows * cols), scales(q.operand_scales(rows, cols)),
          transposed_scales(q.operand_scales(cols, rows)), slot(1) {
        slot.zero();
    }
    Operand operand() const { return {{codes.get(), scales.get(), rows, cols, quant}, transposed_codes.get(), transposed_scales.get(), slot.get()}; }
    bool intact() const { return codes.intact() && transposed_codes.intact() && scales.intact() && transposed_scales.intact() && slot.intact(); }
};
const Quant BLOCK_OUTPUTS[] = {Q_ROW, Q_VECTOR, Q_BLOCK, {Format::E5M2, PER_ROW}, {Format::E5M2, PER_VECTOR}, {Format::E5M2, PER_BLOCK}};

// The reference's quantization of x, one way, against codes and against scales where cuBLAS wants them.
void check_way(const Floats& x, int64_t rows, int64_t cols, Quant q, const Bytes& codes, const Floats& scales) {
    const reference::Quantized expected = reference::quantize(x.data(), rows, cols, q);
    CHECK(same_codes(q.format, codes, expected.codes));
    const Floats laid_out = scales_for_products(expected);
    CHECK(same_bytes(scales, laid_out));
}
void check_blocks(const BlockOperand& out, const Floats& x) {
    CHECK(out.intact());
    check_way(x, out.rows, out.cols, out.quant, out.codes.read(), out.scales.read());
    check_way(transposed(x, out.rows, out.cols), out.cols, out.rows, out.quant, out.transposed_codes.read(), out.transposed_scales.read());
    const float amax = out.slot.read()[0].amax, wanted = reference::amax(x.data(), out.rows * out.cols);
    CHECK((amax == wanted || (!std::isfinite(amax) && !std::isfinite(wanted))));
}

// The two steps above for one rule: FP32 values against `expected`; amax, FP8 codes, transposes, rounding to BF16 and column sums
// against those values.
void check_computed(const Computed& x, const Doubles& expected, const Doubles& bound) {
    const int64_t rows = x.rows, cols = x.cols;
    Tensor exact(rows, cols, Q_F32), half(rows, cols, Q_BF16);
    gpu::quantize(x, exact.operand(), nullptr, 0);
    gpu::quantize(x, half.operand(), nullptr, 0);
    const Floats values = exact.values();
    check_close(values, expected, bound);
    CHECK(exact.intact());
    CHECK(half.intact());
    CHECK(same_bytes(half.values(), rounded(Format::BF16, values)));
    for (Quant q : FP8_OUTPUTS) {
        Tensor out(rows, cols, q), again(rows, cols, q);
        for (Tensor* t : {&out, &again}) {
            gpu::amax(x, t->slot(), 0);
            gpu::quantize(x, t->operand(), nullptr, 0);
        }
        CHECK(out.amax() == reference::amax(values.data(), rows * cols));
        check_quantized(out, values, rows, cols, q);
        CHECK(same_bytes(out.codes.read(), again.codes.read()));
        Tensor only_transposed(rows, cols, q);
        only_transposed.scales.write(out.scales.read());
        Operand operand = only_transposed.operand();
        operand.view.codes = nullptr;
        gpu::quantize(x, operand, nullptr, 0);
        CHECK(same_bytes(only_transposed.transposed.read(), out.transposed.read()));
    }
    for (Quant q : BLOCK_OUTPUTS) {
        CAPTURE(q.text());
        const BlockOperand out(rows, cols, q), lying(rows, cols, q), turned(rows, cols, q);
        gpu::quantize(x, out.operand(), nullptr, 0);
        check_blocks(out, values);
        Operand one = lying.operand(), other = turned.operand();
        one.transposed = one.transposed_scales = nullptr;
        other.view.codes = other.view.scales = nullptr;
        gpu::quantize(x, one, nullptr, 0);
        gpu::quantize(x, other, nullptr, 0);
        CHECK(same_bytes(lying.codes.read(), out.codes.read()));
        CHECK(same_bytes(lying.scales.read(), out.scales.read()));
        CHECK(same_bytes(turned.transposed_codes.read(), out.transposed_codes.read()));
        CHECK(same_bytes(turned.transposed_scales.read(), out.transposed_scales.read()));
    }
    for (Quant q : FP8_OUTPUTS) {  // with a delayed scale, beyond which some numbers saturate
        Tensor out(rows, cols, q);
        const float scale = reference::scale_of(q, reference::amax(values.data(), rows * cols) / 2);
        succeeded(cudaMemcpy(&out.slot()->delayed, &scale, sizeof scale, cudaMemcpyHostToDevice));
        gpu::quantize(x, out.operand(), nullptr, 0);
        const reference::Quantized wanted = reference::quantize(values.data(), rows, cols, q, nullptr, &scale);
        CHECK(same_codes(q.format, out.codes.read(), wanted.codes));
        CHECK(same_codes(q.format, out.transposed.read(), transposed(wanted.codes, rows, cols)));
        CHECK(out.scale() == scale);
        CHECK(out.amax() == reference::amax(values.data(), rows * cols));
        CHECK(out.intact());
    }
    for (Format rounding : {Format::F32, Format::BF16}) {
        const Floats before(cols, 0.5f);
        Tensor sums(before, Format::F32);
        Buffer<float> workspace(gpu::COLUMN_PARTIALS * cols);
        Buffer<TensorScale> slot(1);
        slot.zero();
        gpu::column_sums(x, rounding, sums.view(), workspace.get(), slot.get(), 0);
        CHECK(slot.read()[0].amax == reference::amax(values.data(), rows * cols));
        Doubles total(cols, 0.5), sizes(cols, 0.5);
        for (int64_t i = 0; i < rows * cols; i++) {
            const double v = reference::round_to(rounding, values[i]);
            total[i % cols] += v;
            sizes[i % cols] += std::abs(v);
        }
        for (double& s : sizes) s *= (static_cast<double>(rows) / 100 + 200) * U;  // additions one after another in a strip, and then of strips
        check_close(sums.values(), total, sizes);
        CHECK(workspace.intact());
    }
}

}  // namespace

GPU_TEST_CASE("quantizers and their transposes equal the reference byte for byte") {
    FRESH_RANDOM(rng);
    for (Format stream : {Format::F32, Format::BF16})
        for (const Distribution& d : distributions())
            for (Shape s : SHAPES) {
                if (too_long(s.rows * s.cols)) continue;
                CAPTURE(d.name);
                CAPTURE(s.rows);
                const Floats x = rounded(stream, sample(d, rng, s.rows * s.cols));
                const Tensor in(x, s.rows, s.cols, Quant{stream});
                for (Quant q : {Q_E4M3, Q_E5M2, Q_GROUP}) {
                    Tensor out(s.rows, s.cols, q);
                    const bool groups = q.granularity == PER_GROUP;
                    if (!groups) gpu::amax(gpu::stored(in.view()), out.slot(), 0);
                    gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
                    check_quantized(out, x, s.rows, s.cols, q);
                    if (!groups) CHECK(out.amax() == reference::amax(x.data(), s.rows * s.cols));
                    Tensor back(s.rows, s.cols, Q_F32), half(s.rows, s.cols, Q_BF16);
                    gpu::dequantize(out.view(), back.view(), 0);
                    gpu::dequantize(out.view(), half.view(), 0);
                    CHECK(same_bytes(back.values(), out.values()));
                    CHECK(same_bytes(half.values(), rounded(Format::BF16, out.values())));
                    CHECK(back.intact());
                }
                for (Quant q : BLOCK_OUTPUTS) {
                    CAPTURE(q.text());
                    const BlockOperand out(s.rows, s.cols, q);
                    gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
                    check_blocks(out, x);
                }
            }
}

GPU_TEST_CASE("every BF16 number up to 448 has the reference's code") {
    Floats x;
    for (uint32_t bits = 0; bits < 65536; bits++)
        if (std::abs(reference::from_bf16(static_cast<uint16_t>(bits))) <= 448) x.push_back(reference::from_bf16(static_cast<uint16_t>(bits)));
    x.resize(round_up(x.size(), 16), 0.0f);
    const int64_t n = static_cast<int64_t>(x.size());
    const Tensor in(x, 1, n, Q_BF16);
    Tensor out(1, n, Q_E4M3);
    gpu::amax(gpu::stored(in.view()), out.slot(), 0);
    gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
    CHECK(out.scale() == 1.0f);
    check_quantized(out, x, 1, n, Q_E4M3);
}

GPU_TEST_CASE("NaN and infinity reach the amax and a tensor's scale stays 1; a group that has one is NaN") {
    FRESH_RANDOM(rng);
    for (float bad : {INFINITY, -INFINITY, NAN})
        for (Quant q : {Q_E4M3, Q_E5M2, Q_GROUP}) {
            Floats x = normals(rng, Format::BF16, 200 * 160);
            x[rng.below(200 * 160)] = bad;
            const Tensor in(x, 200, 160, Q_BF16);
            Tensor out(200, 160, q);
            if (q.granularity == PER_TENSOR) gpu::amax(gpu::stored(in.view()), out.slot(), 0);
            gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
            check_quantized(out, x, 200, 160, q);
            if (q.granularity == PER_TENSOR) CHECK(!std::isfinite(out.amax()));
        }
    for (float bad : {INFINITY, -INFINITY, NAN})
        for (Quant q : BLOCK_OUTPUTS) {
            CAPTURE(q.text());
            Floats x = normals(rng, Format::BF16, 200 * 160);
            x[rng.below(200 * 160)] = bad;
            const Tensor in(x, 200, 160, Q_BF16);
            const BlockOperand out(200, 160, q);
            gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
            check_blocks(out, x);
            CHECK(!std::isfinite(out.slot.read()[0].amax));
        }
}

GPU_TEST_CASE("codes written over what they are made from, with a delayed scale: the amax is that of the values") {
    // A thread whose rows end inside of its eight reads the last one again, after it has written codes there. In groups whose first gate is large the
    // gradients of small gates make large codes, which read as large gates. Both halves: d up = dh silu(gate), d gate = dh up silu'(gate).
    const int64_t F = 64;
    for (int64_t rows : {3, 130, 131, 133}) {
        Floats up(rows * 2 * F), dh(rows * F);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < F; c++) {
                const bool large = c % 16 == 0;
                up[r * 2 * F + c] = large ? 400.0f : 1.0f, up[r * 2 * F + F + c] = 1.0f;
                dh[r * F + c] = large ? 0x1p-14f : 1.0f;
            }
        const Tensor in(up, rows, 2 * F, Q_GROUP), gradient(dh, rows, F, Q_BF16);
        const Computed x = gpu::activation_backward(true, in.view(), gradient.view());
        Tensor values(rows, 2 * F, Q_F32), out(rows, 2 * F, Q_E5M2);
        gpu::quantize(x, values.operand(), nullptr, 0);
        const Floats exact = values.values();
        const float amax = reference::amax(exact.data(), rows * 2 * F), scale = reference::scale_of(Q_E5M2, amax);
        succeeded(cudaMemcpy(&out.slot()->delayed, &scale, sizeof scale, cudaMemcpyHostToDevice));
        Operand operand = out.operand();
        operand.view.codes = in.codes.get();
        gpu::quantize(x, operand, nullptr, 0);
        INFO(rows);
        CHECK(out.amax() == amax);
        CHECK(same_codes(Format::E5M2, in.codes.read(), reference::quantize(exact.data(), rows, 2 * F, Q_E5M2, nullptr, &scale).codes));
    }
}

GPU_TEST_CASE("an operand with more rows than there are values: those that there are have the codes and scales of their own") {
    FRESH_RANDOM(rng);
    const int64_t rows = 21, all = 32, cols = 272;
    const Floats x = heavy(rng, Format::BF16, rows * cols);
    const Tensor in(x, rows, cols, Q_BF16);
    for (Quant q : {Q_E4M3, Q_ROW, Q_VECTOR, Q_BLOCK}) {
        CAPTURE(q.text());
        const bool one = q.granularity == PER_TENSOR;
        Buffer<uint8_t> codes(all * cols);
        Buffer<float> scales(one ? 4 : q.operand_scales(all, cols));
        Buffer<TensorScale> slot(1);
        scales.zero(), slot.zero();
        const Operand out{{codes.get(), scales.get(), all, cols, q}, nullptr, nullptr, slot.get()};
        if (one) gpu::amax(gpu::stored(in.view()), gpu::tensor_scale(out.view), 0);
        gpu::quantize(gpu::stored(in.view()), out, nullptr, 0);
        const reference::Quantized wanted = reference::quantize(x.data(), rows, cols, q);
        const Bytes got = codes.read();
        CHECK(same_codes(q.format, Bytes(got.begin(), got.begin() + rows * cols), wanted.codes));
        CHECK(std::all_of(got.begin() + rows * cols, got.end(), [](uint8_t c) { return c == 0xFF; }));  // nobody writes there
        const Floats laid_out = scales.read();
        const int64_t padded = q.granularity == PER_BLOCK ? round_up(q.scale_cols(cols), 4) : 0;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) {
                const int64_t at = one ? 0 : q.granularity == PER_ROW ? r : q.granularity == PER_VECTOR ? c / 128 * all + r : r / 128 * padded + c / 128;
                REQUIRE(laid_out[at] == wanted.scale(r, c));
            }
        CHECK(codes.intact());
        CHECK(scales.intact());
    }
}

GPU_TEST_CASE("through groups: the groups of an ordinary quantization, and in BF16 what they hold") {
    FRESH_RANDOM(rng);
    for (Shape s : SHAPES) {
        if (too_long(s.rows * s.cols)) continue;
        Floats x = heavy(rng, Format::BF16, s.rows * s.cols);
        x[rng.below(s.rows * s.cols)] = INFINITY;
        const Tensor in(x, s.rows, s.cols, Q_BF16);
        Tensor groups(s.rows, s.cols, Q_GROUP), wide(s.rows, s.cols, Q_BF16), again(s.rows, s.cols, Q_BF16);
        gpu::quantize_through(in.view(), groups.view(), nullptr, 0);
        check_quantized(groups, x, s.rows, s.cols, Q_GROUP);
        gpu::dequantize(groups.view(), again.view(), 0);
        CHECK(same_bytes(in.codes.read(), again.codes.read()));
        // A per-tensor operand made from groups is made from the numbers that they hold, not from their BF16 roundings.
        Tensor operand(s.rows, s.cols, Q_E4M3);
        gpu::amax(gpu::stored(groups.view()), operand.slot(), 0);
        gpu::quantize(gpu::stored(groups.view()), operand.operand(), nullptr, 0);
        check_quantized(operand, reference::dequantize(reference::quantize(x.data(), s.rows, s.cols, Q_GROUP)), s.rows, s.cols, Q_E4M3);
        CHECK(!std::isfinite(operand.amax()));  // what is not finite is not hidden by a group's codes
        CHECK(in.intact());
    }
}

GPU_TEST_CASE("FP8 transpose") {
    FRESH_RANDOM(rng);
    for (Shape s : SHAPES) {
        if (too_long(s.rows * s.cols)) continue;
        Bytes codes(s.rows * s.cols);
        for (uint8_t& c : codes) c = static_cast<uint8_t>(rng.bits());
        Tensor x(s.rows, s.cols, Q_E4M3);
        x.codes.write(codes);
        gpu::transpose_fp8(x.view(), x.transposed.get(), 0);
        CHECK(same_bytes(x.transposed.read(), transposed(codes, s.rows, s.cols)));
        CHECK(x.intact());
    }
}

GPU_TEST_CASE("quantization errors are counted as in the reference") {
    FRESH_RANDOM(rng);
    for (Quant q : {Q_E4M3, Q_E5M2, Q_GROUP}) {
        const Floats x = heavy(rng, Format::BF16, 300 * 272);
        const Tensor in(x, 300, 272, Q_BF16);
        Tensor out(300, 272, q);
        Buffer<QuantStats> stats(1);
        stats.zero();
        if (q.granularity == PER_TENSOR) gpu::amax(gpu::stored(in.view()), out.slot(), 0);
        gpu::quantize(gpu::stored(in.view()), out.operand(), stats.get(), 0);
        QuantStats expected;
        reference::quantize(x.data(), 300, 272, q, &expected);
        const QuantStats got = stats.read()[0];
        CHECK(got.elements == expected.elements);
        CHECK(got.saturated == expected.saturated);
        CHECK(got.flushed == expected.flushed);
        CHECK(got.signal == doctest::Approx(expected.signal).epsilon(1e-10));  // sums of 81600 doubles in another order
        CHECK(got.noise == doctest::Approx(expected.noise).epsilon(1e-10));
    }
    // Of scales by blocks each way counts that has scales of its own; beyond a delayed scale numbers saturate.
    std::vector<std::pair<Quant, bool>> others;
    for (Quant q : BLOCK_OUTPUTS) others.push_back({q, false});
    for (Quant q : FP8_OUTPUTS) others.push_back({q, true});
    for (const std::pair<Quant, bool>& row : others) {
        const Quant q = row.first;
        const bool delayed = row.second;
        CAPTURE(q.text());
        const Floats x = heavy(rng, Format::BF16, 300 * 272);
        const Tensor in(x, 300, 272, Q_BF16);
        Buffer<QuantStats> stats(1);
        stats.zero();
        QuantStats expected;
        if (delayed) {
            Tensor out(300, 272, q);
            const float scale = reference::scale_of(q, reference::amax(x.data(), 300 * 272) / 3);
            succeeded(cudaMemcpy(&out.slot()->delayed, &scale, sizeof scale, cudaMemcpyHostToDevice));
            gpu::quantize(gpu::stored(in.view()), out.operand(), stats.get(), 0);
            reference::quantize(x.data(), 300, 272, q, &expected, &scale);
            CHECK(expected.saturated > 0);
        } else {
            const BlockOperand out(300, 272, q);
            gpu::quantize(gpu::stored(in.view()), out.operand(), stats.get(), 0);
            reference::quantize(x.data(), 300, 272, q, &expected);
            if (!q.granularity.same_both_ways()) reference::quantize(transposed(x, 300, 272).data(), 272, 300, q, &expected);
        }
        const QuantStats got = stats.read()[0];
        CHECK(got.elements == expected.elements);
        CHECK(got.saturated == expected.saturated);
        CHECK(got.flushed == expected.flushed);
        CHECK(got.signal == doctest::Approx(expected.signal).epsilon(1e-10));
        CHECK(got.noise == doctest::Approx(expected.noise).epsilon(1e-10));
    }
}

GPU_TEST_CASE("delayed scales follow the amaxes of the steps before, as in the reference") {
    FRESH_RANDOM(rng);
    constexpr int64_t SLOTS = 5;
    for (int length : {1, 3, 256, 257, 1024})
        for (const auto& [format, margin] : {std::pair{Format::E4M3, 0}, std::pair{Format::E5M2, 2}}) {
            CAPTURE(length);
            std::vector<reference::DelayedScale> wanted(SLOTS);
            std::vector<TensorScale> slots(SLOTS);
            Floats histories;
            for (int64_t i = 0; i < SLOTS; i++) {
                wanted[i].history.assign(length, 0.0f);
                for (float& amax : wanted[i].history) amax = rng.below(3) ? static_cast<float>(std::exp(3 * rng.normal())) : 0.0f;
                if (i == 0) wanted[i].history.assign(length, 0.0f);  // no step yet
                histories.insert(histories.end(), wanted[i].history.begin(), wanted[i].history.end());
                slots[i].delayed = wanted[i].scale = i == 0 ? 0.0f : static_cast<float>(rng.uniform());
            }
            Buffer<float> device_histories(histories);
            Buffer<TensorScale> device_slots(slots);
            Buffer<gpu::GradientState> state(1);
            Buffer<uint32_t> without(1);
            for (const bool skipped : {false, true, false, false}) {
                slots = device_slots.read();
                for (int64_t i = 0; i < SLOTS; i++)  // of the first: nothing, and then a number whose power of two overflows
                    slots[i].amax = wanted[i].amax = i == 0 ? 0.0f : i == 1 ? 3e38f : static_cast<float>(std::exp(3 * rng.normal()));
                device_slots.write(slots);
                state.write({gpu::GradientState{1, 1, 1, skipped}});
                without.zero();
                gpu::end_delayed_step(device_slots.get(), SLOTS, device_histories.get(), length, margin, format, state.get(),
                                      without.get(), 0);
                CHECK(without.read()[0] == (skipped ? 0u : 1u));  // the first has never had an amax
                const auto got = device_slots.read();
                const Floats got_histories = device_histories.read();
                for (int64_t i = 0; i < SLOTS; i++) {
                    if (!skipped) wanted[i].end_step(format, margin);
                    CHECK(got[i].delayed == wanted[i].scale);
                    CHECK(std::equal(wanted[i].history.begin(), wanted[i].history.end(), got_histories.begin() + i * length));
                }
            }
            CHECK(device_histories.intact());
            CHECK(device_slots.intact());
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// Norms and the residual pair

namespace {

struct Pair {  // a recipe's stream and how it holds the inputs of norms and activations
    Format stream;
    Quant nonlinear;
};
const Pair PAIRS[] = {{Format::BF16, Q_GROUP}, {Format::BF16, Q_BF16}, {Format::F32, Q_F32}};

struct NormCase {
    Tensor in, gain, bias;
    Buffer<float2> stats;
    bool rms;
    int64_t N, C;
    static constexpr float EPS = 1e-5f;

    NormCase(Random& rng, Pair p, bool rms, int64_t N, int64_t C)
        : in(N, C, p.nonlinear), gain(normals(rng, p.stream, C), p.stream), bias(normals(rng, p.stream, C), p.stream), stats(N), rms(rms), N(N), C(C) {}
    gpu::Norm norm() const { return {in.view(), gain.codes.get(), rms ? nullptr : bias.codes.get(), stats.get(), rms, EPS}; }
    Doubles forward(const Doubles& x) const {
        Doubles y(N * C);
        const Doubles g = doubles(gain.values()), b = doubles(bias.values());
        reference::norm_forward<double>(rms, EPS, N, C, x.data(), g.data(), rms ? nullptr : b.data(), y.data());
        return y;
    }
    // A thread adds at most 32 numbers and then 5 + 16 more: sums are good to 53 u of the sum of magnitudes, the root of a mean
    // square to half of it, and five roundings follow. A mean comes with an error relative to the mean magnitude.
    Doubles bound(const Doubles& x, const Doubles& y) const {
        const Floats g = gain.values(), b = bias.values();
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

const Shape ROWS[] = {{1, 16}, {5, 48}, {33, 128}, {19, 768}, {7, 1040}, {6, 2064}, {9, 4096}, {3, 6656}, {2, 16384}};

}  // namespace

GPU_TEST_CASE("residual pair: stream, norm input, statistics, and the norm that follows") {
    FRESH_RANDOM(rng);
    for (Pair p : PAIRS)
        for (bool rms : {true, false})
            for (Shape s : ROWS) {
                CAPTURE(s.cols);
                CAPTURE(rms);
                const int64_t n = s.rows * s.cols;
                const Floats x = heavy(rng, p.stream, n), a = heavy(rng, p.stream, n);
                Floats sum(n);
                for (int64_t i = 0; i < n; i++) sum[i] = x[i] + a[i];
                const Tensor dx(x, s.rows, s.cols, Quant{p.stream}), da(a, s.rows, s.cols, Quant{p.stream});
                Tensor x_out(s.rows, s.cols, Quant{p.stream}), y(s.rows, s.cols, Q_E4M3);
                NormCase c(rng, p, rms, s.rows, s.cols);
                gpu::residual_add(dx.view(), da.view(), x_out.view(), c.norm(), y.slot(), nullptr, 0);
                CHECK(same_bytes(x_out.values(), rounded(p.stream, sum)));
                const reference::Quantized expected = reference::quantize(sum.data(), s.rows, s.cols, p.nonlinear);
                CHECK(same_bytes(c.in.codes.read(), expected.codes));
                CHECK(same_bytes(c.in.scales.read(), expected.scales));
                CHECK(c.in.intact());
                CHECK(x_out.intact());
                CHECK(c.stats.intact());

                const Doubles in = doubles(c.in.values()), out = c.forward(in);
                check_computed(gpu::norm(c.norm()), out, c.bound(in, out));
                Tensor values(s.rows, s.cols, Q_F32);
                gpu::quantize(gpu::norm(c.norm()), values.operand(), nullptr, 0);
                CHECK(y.amax() == reference::amax(values.values().data(), n));

                const auto before = c.stats.read();
                Tensor again(s.rows, s.cols, Q_E4M3);
                gpu::norm_statistics(c.norm(), again.slot(), 0);
                CHECK(same_bytes(c.stats.read(), before));
                CHECK(again.amax() == y.amax());
            }
}

GPU_TEST_CASE("embedding forward and backward, positions") {
    FRESH_RANDOM(rng);
    for (Pair p : PAIRS)
        for (bool positions : {true, false}) {
            const int64_t B = 3, T = 111, N = B * T, C = 272, V = 128, live = 100;
            const Floats e = normals(rng, p.stream, V * C), w = normals(rng, p.stream, T * C), g = heavy(rng, p.stream, N * C);
            std::vector<int32_t> tokens(N);
            for (int32_t& t : tokens) t = static_cast<int32_t>(rng.below(3) ? rng.below(3) : rng.below(live));  // some are frequent
            const Buffer<int32_t> dtokens(tokens);
            const Tensor de(e, V, C, Quant{p.stream}), dw(w, T, C, Quant{p.stream}), dg(g, N, C, Quant{p.stream});
            Tensor x(N, C, Quant{p.stream});
            NormCase c(rng, p, true, N, C);
            gpu::embedding_forward(dtokens.get(), de.view(), positions ? dw.view() : View{}, T, x.view(), c.norm(), nullptr, nullptr, 0);
            Floats sum(N * C);
            for (int64_t i = 0; i < N * C; i++) sum[i] = e[tokens[i / C] * C + i % C] + (positions ? w[i / C % T * C + i % C] : 0);
            CHECK(same_bytes(x.values(), rounded(p.stream, sum)));
            CHECK(same_bytes(c.in.codes.read(), reference::quantize(sum.data(), N, C, p.nonlinear).codes));

            auto order = gpu::embedding_order(tokens.data(), N, V);
            REQUIRE(static_cast<int64_t>(order.chunks.size()) <= gpu::embedding_chunks(N));
            const Buffer<int32_t> dorder(order.order);
            const Buffer<gpu::EmbeddingChunk> chunks(order.chunks);
            Buffer<float> workspace(static_cast<int64_t>(order.chunks.size()) * C);
            for (const Format held : {p.stream, Format::F32}) {
                const Tensor gradient(e, V, C, Quant{held}), by_position(w, T, C, Quant{held});
                gpu::embedding_backward(dg.view(), dorder.get(), chunks.get(), static_cast<int64_t>(order.chunks.size()), gradient.view(), workspace.get(), 0);
                gpu::positions_backward(dg.view(), T, by_position.view(), 0);
                auto check = [&](const Floats& got, const Floats& before, auto row) {
                    Doubles total = doubles(before), bound(before.size());
                    for (size_t i = 0; i < bound.size(); i++) bound[i] = std::abs(before[i]) * U;
                    for (int64_t i = 0; i < N * C; i++) {
                        total[row(i / C) * C + i % C] += g[i];
                        bound[row(i / C) * C + i % C] += std::abs(g[i]) * 64 * U;  // 32 in a chunk, up to N / 32 chunks, the gradient
                    }
                    for (size_t i = 0; i < bound.size(); i++) bound[i] += half_ulp(held) * (std::abs(total[i]) + bound[i]);
                    check_close(got, total, bound);
                };
                check(gradient.values(), e, [&](int64_t n) { return tokens[n]; });
                check(by_position.values(), w, [&](int64_t n) { return n % T; });
                CHECK(gradient.intact());
                CHECK(workspace.intact());
            }
        }
}

GPU_TEST_CASE("norm backward: input, gain and bias gradients, amax, statistics") {
    FRESH_RANDOM(rng);
    for (Pair p : PAIRS)
        for (bool rms : {true, false})
            for (Shape s : {Shape{1, 16}, {50, 48}, {700, 128}, {2500, 768}, {37, 1040}, {40, 4096}, {9, 6656}, {3, 16384}}) {
                if (too_long(s.rows * s.cols)) continue;
                CAPTURE(s.cols);
                CAPTURE(rms);
                const int64_t N = s.rows, C = s.cols;
                NormCase c(rng, p, rms, N, C);
                const Tensor in(heavy(rng, p.stream, N * C), N, C, p.nonlinear);
                const Floats dy = heavy(rng, p.stream, N * C), g = normals(rng, p.stream, N * C), before = normals(rng, p.stream, C);
                const Tensor ddy(dy, N, C, Quant{p.stream}), dg(g, N, C, Quant{p.stream});
                gpu::Norm norm = c.norm();
                norm.in = in.view();
                Buffer<float> workspace(static_cast<int64_t>(gpu::norm_backward_workspace(C) / sizeof(float)));
                Bytes first_run;
                for (bool add : {true, false, true}) {
                    Tensor out(N, C, Quant{p.stream}), slot(1, 16, Q_E5M2), dgain(before, p.stream), dbias(before, p.stream);
                    gpu::norm_backward(norm, ddy.view(), add ? dg.view() : View{}, out.view(), slot.slot(), dgain.view(), rms ? View{} : dbias.view(),
                                       workspace.get(), 0);
                    const Floats got = out.values();
                    CHECK(slot.amax() == reference::amax(got.data(), N * C));
                    const auto stats = c.stats.read();
                    gpu::norm_statistics(norm, nullptr, 0);
                    CHECK(same_bytes(c.stats.read(), stats));
                    CHECK(out.intact());
                    CHECK(workspace.intact());
                    if (add && !first_run.empty()) CHECK(same_bytes(first_run, out.codes.read()));
                    if (add) first_run = out.codes.read();

                    const Doubles x = doubles(in.values()), w = doubles(c.gain.values()), d = doubles(dy);
                    Doubles dx(N * C), dw = doubles(before), db = doubles(before), bound(N * C), bound_w(C), bound_b(C);
                    reference::norm_backward<double>(rms, NormCase::EPS, N, C, x.data(), w.data(), d.data(), dx.data(), dw.data(), rms ? nullptr : db.data());
                    for (int64_t n = 0; n < N; n++) {  // every term of dx carries the errors of the sums and a handful of roundings
                        const double *row = &x[n * C], *drow = &d[n * C];
                        double mean = 0, magnitude = 0, square = 0, a = 0, b = 0;
                        for (int64_t i = 0; i < C; i++) mean += rms ? 0 : row[i] / C, magnitude += rms ? 0 : std::abs(row[i]) / C;
                        for (int64_t i = 0; i < C; i++) square += (row[i] - mean) * (row[i] - mean) / C;
                        const double inverse = 1 / std::sqrt(square + NormCase::EPS);
                        auto xhat = [&](int64_t i) { return (std::abs(row[i] - mean) + 2 * magnitude) * inverse; };
                        for (int64_t i = 0; i < C; i++) a += std::abs(drow[i] * w[i]) / C, b += std::abs(drow[i] * w[i]) * xhat(i) / C;
                        for (int64_t i = 0; i < C; i++) {
                            bound[n * C + i] = 192 * U * inverse * (std::abs(drow[i] * w[i]) + a + xhat(i) * b);
                            bound_w[i] += std::abs(drow[i]) * xhat(i);
                            bound_b[i] += std::abs(drow[i]);
                        }
                    }
                    for (int64_t i = 0; i < N * C; i++) {
                        dx[i] += add ? g[i] : 0;
                        bound[i] += (half_ulp(p.stream) + 2 * U) * (std::abs(dx[i]) + bound[i]);
                    }
                    check_close(got, dx, bound);
                    for (int64_t i = 0; i < C; i++) {  // a block adds up its rows, then blocks are added
                        bound_w[i] = (256 + N / 64) * U * bound_w[i] + (half_ulp(p.stream) + U) * (std::abs(dw[i]) + U * bound_w[i]);
                        bound_b[i] = (256 + N / 64) * U * bound_b[i] + (half_ulp(p.stream) + U) * (std::abs(db[i]) + U * bound_b[i]);
                    }
                    check_close(dgain.values(), dw, bound_w);
                    if (!rms) check_close(dbias.values(), db, bound_b);
                }
            }
}

// ---------------------------------------------------------------------------------------------------------------------
// Activations, RoPE, loss

GPU_TEST_CASE("activations forward and backward") {
    FRESH_RANDOM(rng);
    for (Pair p : PAIRS)
        for (bool gated : {true, false})
            for (Shape s : {Shape{1, 16}, {33, 48}, {130, 144}, {256, 352}}) {
                if (too_long(s.rows * s.cols)) continue;
                CAPTURE(s.cols);
                CAPTURE(gated);
                const int64_t N = s.rows, F = s.cols, planes = gated ? 2 : 1;
                const Tensor up(heavy(rng, p.stream, N * F * planes), N, F * planes, p.nonlinear), dh(heavy(rng, p.stream, N * F), N, F, Quant{p.stream});
                const Doubles x = doubles(up.values()), d = doubles(dh.values());
                Doubles h(N * F), dup(N * F * planes), bound(N * F), dbound(N * F * planes);
                reference::activation_forward<double>(gated, N, F, x.data(), h.data());
                reference::activation_backward<double>(gated, N, F, x.data(), d.data(), dup.data());
                // exp's error grows with its argument z: 2 z u and a few units of its own and of the reciprocal. Beyond 2^126 the fast
                // reciprocal gives zero: the absolute term. The reference's 1 + tanh(z), even in double, is only good to 2^-53.
                for (int64_t i = 0; i < N * F; i++) {
                    const int64_t at = gated ? i / F * 2 * F + i % F : i;
                    const double a = x[at], slope = gated ? 1 : 1.5957691216 * (1 + 3 * 0.044715 * a * a), z = gated ? a : 1.5957691216 * (a + 0.044715 * a * a * a);
                    const double sig = 1 / (1 + std::exp(-z)), up_i = gated ? x[at + F] : 1, error = (8 * std::abs(z) + 64) * U, tiny = 0x1p-110 * (1 + std::abs(a * up_i)) + (gated ? 0 : std::abs(a) * 0x1p-51);
                    bound[i] = std::abs(a * sig * up_i) * error + tiny;
                    const double bend = sig * (1 + std::abs(a) * slope * (1 - sig + 8 * U) * (1 + 8));
                    dbound[at] = std::abs(d[i] * up_i) * (bend * error + sig * std::abs(a) * slope * 16 * U) + std::abs(d[i]) * (tiny * slope + (gated ? 0 : 0x1p-51));
                    if (gated) dbound[at + F] = std::abs(d[i] * a * sig) * error + std::abs(d[i]) * tiny;
                }
                check_computed(gpu::activation(gated, up.view()), h, bound);
                check_computed(gpu::activation_backward(gated, up.view(), dh.view()), dup, dbound);
            }
}

GPU_TEST_CASE("activations forward and backward are finite for inputs of any size") {
    const Floats sizes = {1, 4, 9, 11, 12, 88, 90, 1e3f, 1e10f, 1e20f, 1e30f, 3e38f};
    for (Pair p : PAIRS)
        for (bool gated : {true, false}) {
            const int64_t N = static_cast<int64_t>(sizes.size()) * 2, F = 16, cols = gated ? 2 * F : F;
            Floats up(N * cols, 1.0f);  // a row for each size and sign; gates' others are 1
            for (int64_t i = 0; i < N; i++)
                for (int64_t j = 0; j < F; j++) up[i * cols + j] = (i % 2 ? -1 : 1) * sizes[i / 2];
            const Tensor x(up, N, cols, p.nonlinear), dh(Floats(N * F, 1.0f), N, F, Quant{p.stream});
            Tensor h(N, F, Q_F32), dup(N, cols, Q_F32);
            gpu::quantize(gpu::activation(gated, x.view()), h.operand(), nullptr, 0);
            gpu::quantize(gpu::activation_backward(gated, x.view(), dh.view()), dup.operand(), nullptr, 0);
            const Floats in = x.values(), forward = h.values(), backward = dup.values();
            for (int64_t i = 0; i < N; i++) {
                CAPTURE(gated);
                CAPTURE(in[i * cols]);
                CHECK(std::isfinite(forward[i * F]));
                for (int64_t j : {int64_t(0), cols - 1}) CHECK(std::isfinite(backward[i * cols + j]));
                const double slope = gated ? in[i * cols + F] : 1;  // the slope of SiLU times up as it is stored
                if (sizes[i / 2] >= 90) CHECK(backward[i * cols] == doctest::Approx(i % 2 ? 0 : slope).epsilon(1e-6));
            }
        }
}

GPU_TEST_CASE("what an activation reads goes to groups and leaves the activation's amax") {
    FRESH_RANDOM(rng);
    for (bool gated : {true, false})
        for (Shape s : {Shape{1, 32}, {33, 96}, {130, 288}, {256, 704}}) {
            if (too_long(s.rows * s.cols)) continue;
            CAPTURE(s.cols);
            CAPTURE(gated);
            const Tensor u(heavy(rng, Format::BF16, s.rows * s.cols), s.rows, s.cols, Q_BF16);
            const Tensor up(s.rows, s.cols, Q_GROUP), expected(s.rows, s.cols, Q_GROUP), h(1, 16, Q_E4M3), again(1, 16, Q_E4M3);
            gpu::quantize(gpu::stored(u.view()), expected.operand(), nullptr, 0);
            gpu::amax(gpu::activation(gated, expected.view()), h.slot(), 0);
            gpu::quantize_up(gated, u.view(), up.view(), again.slot(), nullptr, 0);
            CHECK(same_bytes(up.codes.read(), expected.codes.read()));
            CHECK(same_bytes(up.scales.read(), expected.scales.read()));
            CHECK(up.intact());
            CHECK(again.amax() == h.amax());
            CHECK(again.amax() > 0);
        }
}

GPU_TEST_CASE("RoPE forward and backward") {
    FRESH_RANDOM(rng);
    for (Format stream : {Format::BF16, Format::F32})
        for (int64_t HS : {8, 24, 64, 80, 128}) {
            CAPTURE(HS);
            ModelConfig c{"rope", LLAMA, 1, 4 * HS, 4, 2, 64, 64, 256, true};
            const int64_t B = 2, T = 57, N = B * T, cols = c.qkv_cols();
            const Floats x = heavy(rng, stream, N * cols);
            Buffer<float2> table(T * HS / 2);
            gpu::rope_table(c, T, table.get(), 0);
            const gpu::Rope rope{table.get(), T, HS, c.q_cols() + c.kv_cols()};
            Doubles forward = doubles(x), backward = doubles(x), bound(N * cols);
            reference::rope<double>(c, B, T, forward.data(), false);
            reference::rope<double>(c, B, T, backward.data(), true);
            for (int64_t i = 0; i < N * cols; i++) {
                const int64_t col = i % cols, partner = col >= rope.rotated_cols ? 0 : col % HS < HS / 2 ? HS / 2 : -HS / 2;
                bound[i] = partner ? 4 * U * (std::abs(x[i]) + std::abs(x[i + partner])) : 0;  // table, two products, a sum
            }
            const Tensor dx(x, N, cols, Quant{stream});
            check_computed(gpu::rope_backward(rope, dx.view()), backward, bound);
            gpu::rope_forward(rope, dx.view(), 0);
            for (int64_t i = 0; i < N * cols; i++)
                if (bound[i] > 0) bound[i] += half_ulp(stream) * (std::abs(forward[i]) + bound[i]);
            check_close(dx.values(), forward, bound);
            CHECK(dx.intact());
            CHECK(table.intact());
        }
}

GPU_TEST_CASE("cross-entropy and its gradient; the sum of losses") {
    FRESH_RANDOM(rng);
    for (Format stream : {Format::BF16, Format::F32})
        for (Shape s : {Shape{3, 1}, {5, 50}, {4, 64}, {6, 1001}, {2, 32000}, {3, 50257}})
            for (double spread : {1.0, 30.0}) {
                const int64_t N = s.rows, V = s.cols, stride = round_up(V, 64);
                CAPTURE(V);
                const Floats logits = normals(rng, stream, N * stride, spread);
                std::vector<int32_t> targets(N);
                for (int32_t& t : targets) t = static_cast<int32_t>(rng.below(V));
                const Buffer<int32_t> dtargets(targets);
                const Tensor x(logits, N, stride, Quant{stream});
                Buffer<float> losses(N), same(N);
                gpu::cross_entropy(x.view(), V, dtargets.get(), 0, same.get(), 0);
                CHECK(same_bytes(x.values(), logits));
                const float scale = 0.125f;
                gpu::cross_entropy(x.view(), V, dtargets.get(), scale, losses.get(), 0);
                CHECK(same_bytes(same.read(), losses.read()));
                Doubles gradient(N * stride, 0.0), bound(N * stride, 0.0), loss(N), loss_bound(N);
                for (int64_t n = 0; n < N; n++) {
                    const float* row = &logits[n * stride];
                    double sum = 0;
                    const double top = *std::max_element(row, row + V);
                    for (int64_t v = 0; v < V; v++) sum += std::exp(row[v] - top);
                    const double lse = top + std::log(sum), correct = row[targets[n]];
                    loss[n] = lse - correct;
                    // exp(x - top) is good to 2 |x - top| u and 8 u, and what is far below the top weighs little: 40 u covers the terms. A
                    // sum of V / 512 terms in a thread and of 512 threads adds its own.
                    const double sum_error = (64 + V / 512.0) * U;
                    loss_bound[n] = sum_error + 4 * U * (std::abs(lse) + std::abs(correct) + std::abs(top));
                    for (int64_t v = 0; v < V; v++) {
                        const double p = std::exp(row[v] - lse), hot = v == targets[n];
                        gradient[n * stride + v] = (p - hot) * scale;
                        const double error = scale * (p * (loss_bound[n] + (2 * std::abs(row[v] - lse) + 16) * U) + 2 * U * hot);
                        bound[n * stride + v] = error + half_ulp(stream) * (std::abs(gradient[n * stride + v]) + error) + 0x1p-126;
                    }
                }
                check_close(losses.read(), loss, loss_bound);
                check_close(x.values(), gradient, bound);
                CHECK(x.intact());
                CHECK(losses.intact());
                Buffer<double> total(1);
                total.write({2.0});
                gpu::loss_sum(losses.get(), N, 0.5, total.get(), 0);
                double expected = 0;
                for (float l : losses.read()) expected += l;
                CHECK(total.read()[0] == doctest::Approx(2 + 0.5 * expected).epsilon(1e-14));
            }
}

// ---------------------------------------------------------------------------------------------------------------------
// Parameters and the optimizer

GPU_TEST_CASE("initial weights, and splitting and joining masters, equal the reference's") {
    FRESH_RANDOM(rng);
    ModelConfig c = find_row(models(), "gpt2-tiny", "--model");
    c.V = 65, c.L = 1;
    const std::vector<Param> params = parameters(c);
    const int64_t total = params.back().offset + params.back().padded_size();
    for (Format f : {Format::F32, Format::BF16}) {
        Buffer<uint8_t> values(total * info(f).bytes);
        Buffer<int16_t> remainder(total);
        for (size_t i = 0; i < params.size(); i++)
            gpu::initialize({values.get(), f == Format::F32 ? nullptr : remainder.get(), f}, params[i], i, live_elements(c, params[i]), 7, 0);
        const Bytes got = values.read();
        const auto rest = remainder.read();
        int64_t wrong = 0;
        for (size_t i = 0; i < params.size(); i++)
            for (int64_t e = 0; e < params[i].padded_size(); e++) {
                const Param& p = params[i];
                const float expected = e < p.size() ? initial(p.init_std, p.role.gain, live_elements(c, p), 7, i, e) : 0.0f;
                uint16_t weight;
                int16_t remains;
                reference::split_master(expected, &weight, &remains);
                if (f == Format::F32) wrong += std::memcmp(&got[4 * (p.offset + e)], &expected, 4) != 0;
                else wrong += std::memcmp(&got[2 * (p.offset + e)], &weight, 2) != 0 || rest[p.offset + e] != remains;
            }
        CHECK(wrong == 0);
        CHECK(values.intact());
    }
    Floats masters(100001);
    for (size_t i = 0; i < masters.size(); i++) {
        const uint32_t bits = i < 65536 ? 0x3F800000u + static_cast<uint32_t>(i) : static_cast<uint32_t>(rng.bits()) & 0xBFFFFFFFu;
        std::memcpy(&masters[i], &bits, 4);
    }
    const int64_t n = static_cast<int64_t>(masters.size());
    const Buffer<float> in(masters);
    Buffer<float> out(n);
    Buffer<uint16_t> weight(n);
    Buffer<int16_t> remainder(n);
    gpu::split_master(in.get(), weight.get(), remainder.get(), n, 0);
    gpu::join_master(weight.get(), remainder.get(), out.get(), n, 0);
    CHECK(same_bytes(out.read(), masters));
    const auto w = weight.read();
    const auto r = remainder.read();
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t ew;
        int16_t er;
        reference::split_master(masters[i], &ew, &er);
        wrong += ew != w[i] || er != r[i];
    }
    CHECK(wrong == 0);
}

GPU_TEST_CASE("gradient norm, clipping, and steps to skip") {
    FRESH_RANDOM(rng);
    auto state_of = [&](const Floats& g, Format f, double loss, const gpu::Clipping& clip) {
        const Tensor x(g, f);
        Buffer<gpu::GradientState> state(1);
        state.zero();
        Buffer<double> workspace(gpu::GRADIENT_PARTIALS), dloss(1);
        dloss.write({loss});
        gpu::gradient_norm(x.codes.get(), f, static_cast<int64_t>(g.size()), dloss.get(), clip, state.get(), workspace.get(), 0);
        CHECK(workspace.intact());
        return state.read()[0];
    };
    for (Format f : {Format::F32, Format::BF16})
        for (int64_t n : {128, 128 * 1001, 128 * 40000})
            for (double size : {1e-25, 1e-6, 1.0, 1e25}) {
                if (too_long(n)) continue;
                const Floats g = normals(rng, f, n, size);
                double sum = 0;
                for (float v : g) sum += double(v) * v;
                const gpu::GradientState s = state_of(g, f, 1.0, {1.0f});
                CHECK(s.norm == doctest::Approx(std::sqrt(sum)).epsilon(8 * U));  // chunks of 8 in FP32, the rest in double
                CHECK(s.scale == (s.norm > 1 ? static_cast<float>(1 / s.norm) : 1.0f));
                CHECK(s.skip == 0);
                const gpu::GradientState whole = state_of(g, f, 1.0, {0.0f});  // not clipped
                CHECK(whole.scale == 1.0f);
                CHECK(whole.skip == (s.norm >= 0x1p62));
                for (double growth : {1.0, 2.5, 1e3}) {
                    const double norm = s.norm * growth;
                    CHECK(state_of(g, f, 1.0, {1.0f, growth}).scale == (norm > 1 ? static_cast<float>(1 / norm) : 1.0f));
                }
                CHECK(state_of(g, f, 1.0, {1.0f, INFINITY}).scale == 0);
                CHECK(state_of(g, f, 1.0, {1.0f}).norm == s.norm);
            }
    for (float bad : {INFINITY, NAN}) {
        Floats g = normals(rng, Format::BF16, 128 * 999);
        CHECK(state_of(g, Format::BF16, bad, {1.0f}).skip == 1);
        g[rng.below(128 * 999)] = bad;
        const gpu::GradientState s = state_of(g, Format::BF16, 1.0, {1.0f});
        CHECK(s.skip == 1);
    }
}

namespace {

// A parameter's share of the flat order with its state on the host.
struct HostParam {
    int64_t size, offset;
    bool decays;
    Format m_format, v_format;
    reference::Moment m, v;
    int64_t padded() const { return round_up(size, MOMENT_GROUP); }
};

struct DeviceMoment {
    Buffer<uint8_t> codes;
    Buffer<float> max, k;
    Format format;
    bool expand, whole;  // one scale a tensor: there is room for the next maximum
    DeviceMoment(const reference::Moment& m, int64_t padded)
        : codes(padded * info(m.format).bytes), max(static_cast<int64_t>(m.max.size()) * (m.granularity == PER_TENSOR ? 2 : 1)),
          k(static_cast<int64_t>(m.k.size())), format(m.format), expand(m.expand), whole(m.granularity == PER_TENSOR) {
        codes.zero();
        codes.write(m.codes);
        max.write(m.max);
        k.write(m.k);
    }
    gpu::MomentView view() const { return {codes.get(), max.get(), expand ? k.get() : nullptr, format}; }
    Floats maxima() const {  // that decode what there is
        Floats values = max.read();
        if (whole && !values.empty()) values.resize(1);
        return values;
    }
    int64_t group(int64_t n) const { return whole ? n : MOMENT_GROUP; }  // elements that share a scale
    bool intact() const { return codes.intact() && max.intact() && k.intact(); }
};

int code_at(Format f, const Bytes& codes, int64_t i) { return f == Format::F16 ? codes[2 * i] | codes[2 * i + 1] << 8 : codes[i]; }
int sign_of(Format f) { return f == Format::F16 ? 0x8000 : 0x80; }
int encode_any(Format f, float x) { return f == Format::F16 ? reference::to_f16(x) : reference::encode(f, x); }
double decode_any(Format f, int code) { return f == Format::F16 ? reference::from_f16(static_cast<uint16_t>(code)) : reference::decode(f, static_cast<uint8_t>(code)); }

// The new state of one moment and what it should hold: `exact` +- `error` before it is rounded to its format.
void check_moment(const DeviceMoment& d, const Doubles& exact, const Doubles& error, bool second, bool keep_positive) {
    const int64_t n = static_cast<int64_t>(exact.size());
    const Bytes codes = d.codes.read();
    CHECK(d.intact());
    for (size_t i = n * info(d.format).bytes; i < codes.size(); i++) REQUIRE(codes[i] == 0);  // padding
    if (!is_scaled(d.format)) {
        Floats got(n);
        Doubles bound = error;
        for (int64_t i = 0; i < n; i++) {
            uint16_t bits;
            std::memcpy(&bits, &codes[2 * i], 2);
            if (d.format == Format::F32) std::memcpy(&got[i], &codes[4 * i], 4);
            else got[i] = reference::from_bf16(bits), bound[i] += half_ulp(Format::BF16) * (std::abs(exact[i]) + error[i]) + 0x1p-134;
        }
        return check_close(got, exact, bound);
    }
    const Floats max = d.maxima(), k = d.expand ? d.k.read() : Floats(max.size(), 1.0f);
    const double fmax = info(d.format).max, range = std::log2(fmax / info(d.format).min);
    const int sign = sign_of(d.format);
    int64_t bad_max = 0, bad_k = 0, bad_codes = 0, vanished = 0;
    for (int64_t g = 0; g < static_cast<int64_t>(max.size()); g++) {
        const int64_t first = g * d.group(n), last = std::min<int64_t>(n, first + d.group(n));
        double top = 0, top_error = 0, low = INFINITY, low_error = 0;
        for (int64_t i = first; i < last; i++) {
            const double a = std::abs(exact[i]);
            if (a > top) top = a;
            top_error = std::max(top_error, error[i]);
            if (a > 0 && a < low) low = a, low_error = error[i];
        }
        bad_max += !(std::abs(max[g] - top) <= top_error);
        if (max[g] == 0) {
            for (int64_t i = first; i < last; i++) bad_codes += code_at(d.format, codes, i) != 0;
            bad_k += k[g] != 1;
            continue;
        }
        // log2 is good to two units of 2^-23 of a number up to 149; what may be the smallest may also be another by its error, or zero.
        const double ratio = std::log2(top) - std::log2(low);
        const double ratio_error = 2 * 150 * 0x1p-22 + (top_error / top + (low_error < low / 2 ? 2 * low_error / low : INFINITY));
        const double most = ratio - ratio_error > 0 ? 16 * range / (ratio - ratio_error) * (1 + 8 * U) : INFINITY, least = 16 * range / (ratio + ratio_error) * (1 - 8 * U);
        const double k_most = std::min(64.0, std::max(1.0, std::floor(most)) / 16), k_least = std::min(64.0, std::max(1.0, std::floor(least)) / 16);
        if (d.expand) bad_k += k[g] < k_least || k[g] > k_most || k[g] * 16 != std::floor(k[g] * 16);
        // lg2.approx is good to 2^-22 below 1 in size and to 2 units of 2^-23 relative beyond, the quotient before it to 2 u, k log2 to u
        // relative; ex2.approx to 2^-22. (The careful path subtracts two logarithms of up to 149.)
        const bool careful = range > 120 * k[g] || max[g] < 0x1p-100f;
        const double log_error = careful ? 2 * 150 * 0x1p-23 : 0x1p-21;
        const double power_error = d.expand ? k[g] * log_error + range * 0x1p-21 + 0x1p-21 : 4 * U;
        for (int64_t i = first; i < last; i++) {
            auto encoded = [&](double a, double with) {
                return encode_any(d.format, static_cast<float>(std::min(fmax, fmax * std::pow(std::max(0.0, a) / max[g], double(k[g])) * with)));
            };
            const int code = code_at(d.format, codes, i), a = code & (sign - 1), lowest = encoded(std::abs(exact[i]) - error[i], 1 - power_error), highest = encoded(std::abs(exact[i]) + error[i], 1 + power_error);
            const bool kept = second && keep_positive && exact[i] > 0 && a == 1 && lowest == 0;
            bad_codes += !kept && (a < lowest || a > highest);
            bad_codes += std::abs(exact[i]) > error[i] && a > 0 && (code & sign) != (exact[i] < 0 ? sign : 0);
            vanished += second && keep_positive && exact[i] - error[i] > 0 && a == 0;
        }
    }
    CHECK(bad_max == 0);
    CHECK(bad_k == 0);
    CHECK(bad_codes == 0);
    CHECK(vanished == 0);
}

// What a moment's state means, in double, and how far off FP32 may be: the table of logarithms and 1/k to 2 units each of a number up to
// log2(FMAX/FMIN), ex2.approx to 2^-22, a product.
void decode_exactly(const reference::Moment& m, int64_t n, Doubles& x, Doubles& error) {
    Floats held(n);
    x.resize(n), error.assign(n, 0.0);
    if (!is_scaled(m.format)) {
        m.load(0, n, held.data());
        x = doubles(held);
        return;
    }
    const double fmax = info(m.format).max, range = std::log2(fmax / info(m.format).min);
    for (int64_t i = 0; i < n; i++) {
        const int64_t g = m.granularity == PER_TENSOR ? 0 : i / MOMENT_GROUP;
        const double k = m.expand ? m.k[g] : 1, code = decode_any(m.format, code_at(m.format, m.codes, i));
        x[i] = code == 0 || m.max[g] == 0 ? 0.0 : std::copysign(m.max[g] * std::pow(std::abs(code) / fmax, 1 / k), code);
        error[i] = std::abs(x[i]) * (m.expand ? range / k * 0x1p-21 + 0x1p-20 : 8 * U) + (x[i] != 0 ? 0x1p-147 : 0);
    }
}

const OptimizerFormat OPTIMIZERS[] = {
    {"coat", Format::E4M3, Format::E4M3, true, ""},  {"fp8", Format::E4M3, Format::E4M3, false, ""}, {"m, e5m2", Format::E4M3, Format::E5M2, true, ""},
    {"e5m2, m", Format::E5M2, Format::E4M3, false, ""}, {"e5m2", Format::E5M2, Format::E5M2, true, ""}, {"bf16", Format::BF16, Format::BF16, false, ""},
    {"fp8lm", Format::E4M3, Format::F16, false, "", PER_TENSOR, false}, {"whole e5m2, e4m3", Format::E5M2, Format::E4M3, false, "", PER_TENSOR, false},
    {"whole fp16, fp32", Format::F16, Format::F32, false, "", PER_TENSOR, false}, {"whole bf16, fp16", Format::BF16, Format::F16, false, "", PER_TENSOR, false},
    {"fp32", Format::F32, Format::F32, false, ""},   {"fp32, e4m3", Format::F32, Format::E4M3, true, ""}, {"e4m3, bf16", Format::E4M3, Format::BF16, true, ""},
};

const OptimizerFormat& FP8LM = OPTIMIZERS[6];

struct AdamRun {
    static constexpr uint64_t ROUNDING = 0x123456789ABCDEF;
    std::vector<HostParam> params;
    int64_t total = 0;
    Floats master, gradient;  // flat, padded
    Format stream, gradients;  // of the weights, and of the gradients
    OptimizerFormat optimizer;
    bool has_master = true;
    std::vector<size_t> cuts;  // the update is launched for the parameters before each of these, and then for the rest

    AdamRun(Random& rng, Format stream, const OptimizerFormat& o, const Distribution& of_gradients, bool old_state)
        : stream(stream), gradients(stream), optimizer(o) {
        for (int64_t size : {1, 127, 128, 129, 1000, 20000, 128, 130, 50000}) {
            HostParam p{size, total, size % 3 != 0, o.m, o.v, {}, {}};
            if (size == 130 || size == 127) p.m_format = p.v_format = Format::F32;  // a gain
            p.m.init(p.m_format, o.expand, size, o.granularity);
            p.v.init(p.v_format, o.expand, size, o.granularity);
            if (old_state) {
                Floats m(size), v(size);
                for (int64_t i = 0; i < size; i++) {
                    v[i] = static_cast<float>(1e-6 * std::exp(2 * rng.normal()));
                    m[i] = static_cast<float>(std::sqrt(v[i]) * 0.3 * rng.normal());
                    if (size == 20000 && i / 128 % 3 == 0) m[i] = v[i] = 0;  // rows of tokens that never came
                }
                p.m.fit_tensor(size, m.data());
                p.v.fit_tensor(size, v.data());
                p.m.store(0, size, m.data(), false);
                p.v.store(0, size, v.data(), o.keep_positive);
            }
            total += p.padded();
            params.push_back(std::move(p));
        }
        master.assign(total, 0.0f), gradient.assign(total, 0.0f);
        for (const HostParam& p : params)
            for (int64_t i = 0; i < p.size; i++) {
                master[p.offset + i] = static_cast<float>(0.02 * rng.normal());
                gradient[p.offset + i] = reference::round_to(stream, of_gradients.draw(rng, i));
            }
    }

    struct Result {
        std::vector<std::unique_ptr<DeviceMoment>> m, v;
        Floats master;
        std::vector<uint16_t> weight;
        std::vector<TensorScale> amax;
        bool intact;
    };
    Result step(const AdamW& a, float scale, bool skip) const {
        Result r;
        const int64_t n = static_cast<int64_t>(params.size());
        Buffer<TensorScale> slots(n);
        slots.zero();
        std::vector<gpu::Segment> table;
        for (int64_t i = 0; i < n; i++) {
            r.m.push_back(std::make_unique<DeviceMoment>(params[i].m, params[i].padded()));
            r.v.push_back(std::make_unique<DeviceMoment>(params[i].v, params[i].padded()));
            table.push_back({params[i].offset, params[i].size, r.m[i]->view(), r.v[i]->view(), params[i].decays, slots.get() + i});
        }
        const Buffer<gpu::Segment> segments(table);
        const Buffer<gpu::GradientState> state(std::vector<gpu::GradientState>{{1.0, 1.0, scale, skip}});
        const Tensor g(gradient, gradients);
        Buffer<float> masters(master);
        Buffer<uint16_t> weight(total);
        Buffer<int16_t> remainder(total);
        gpu::split_master(masters.get(), weight.get(), remainder.get(), total, 0);
        const bool f32 = stream == Format::F32;
        const gpu::Weights weights{f32 ? static_cast<void*>(masters.get()) : weight.get(), f32 || !has_master ? nullptr : remainder.get(), stream};
        std::vector<size_t> ends = cuts;
        ends.push_back(params.size());
        size_t first = 0;
        for (size_t end : ends) {
            const int64_t offset = params[first].offset, elements = (end < params.size() ? params[end].offset : total) - offset;
            gpu::adamw(a, optimizer, segments.get() + first, static_cast<int>(end - first), {offset, elements}, weights, ROUNDING,
                       static_cast<uint8_t*>(g.codes.get()) + offset * info(gradients).bytes, gradients, state.get(), 0);
            first = end;
        }
        if (!has_master) remainder.zero();
        if (!f32) gpu::join_master(weight.get(), remainder.get(), masters.get(), total, 0);
        r.master = masters.read(), r.weight = weight.read(), r.amax = slots.read();
        r.intact = masters.intact() && weight.intact() && remainder.intact() && slots.intact();
        return r;
    }
};

}  // namespace

// Stochastic rounding of what lies within [w - ew, w + ew], by the rule of coat.h: it is monotone.
void check_stochastic(const Floats& got, const Doubles& w, const Doubles& ew, int64_t offset) {
    int64_t bad = 0;
    for (size_t e = 0; e < got.size(); e++) {
        const uint64_t at = static_cast<uint64_t>(offset) + e;
        auto rounded_down = [&](double x) {
            const float value = static_cast<float>(x);
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            return reference::from_bf16(static_cast<uint16_t>((bits + (rounding_bits(AdamRun::ROUNDING, at / 4) >> 16 * (at % 4) & 0xFFFF)) >> 16));
        };
        bad += !(got[e] >= rounded_down(w[e] - ew[e]) && got[e] <= rounded_down(w[e] + ew[e]));
    }
    CHECK(bad == 0);
}

GPU_TEST_CASE("AdamW in several launches has the bits of one") {
    FRESH_RANDOM(rng);
    for (const auto& [o, has_master] : {std::pair{OPTIMIZERS[0], true}, std::pair{OPTIMIZERS[0], false}, std::pair{FP8LM, true}, std::pair{FP8LM, false}}) {
        AdamRun run(rng, Format::BF16, o, distributions()[0], true);
        run.has_master = has_master;
        CAPTURE(run.optimizer.name);
        const AdamRun::Result whole = run.step({3, 1e-3f}, 0.25f, false);
        run.cuts = {2, 3, 8};
        const AdamRun::Result parts = run.step({3, 1e-3f}, 0.25f, false);
        CHECK(same_bytes(whole.master, parts.master));
        for (size_t i = 0; i < run.params.size(); i++) {
            CHECK(same_bytes(whole.m[i]->codes.read(), parts.m[i]->codes.read()));
            CHECK(same_bytes(whole.v[i]->codes.read(), parts.v[i]->codes.read()));
            CHECK(same_bytes(whole.m[i]->maxima(), parts.m[i]->maxima()));
            CHECK(same_bytes(whole.v[i]->maxima(), parts.v[i]->maxima()));
            CHECK(whole.amax[i].amax == parts.amax[i].amax);
        }
    }
}

GPU_TEST_CASE("AdamW reads FP32 gradients of BF16 weights: the bits of the same gradients in BF16, and what BF16 cuts off counts") {
    FRESH_RANDOM(rng);
    for (const OptimizerFormat& o : OPTIMIZERS)
        for (const bool has_master : {true, false}) {
            AdamRun run(rng, Format::BF16, o, distributions()[0], true);
            run.has_master = has_master;
            CAPTURE(run.optimizer.name);
            CAPTURE(has_master);
            const AdamRun::Result bf16 = run.step({3, 1e-3f}, 0.25f, false);
            run.gradients = Format::F32;
            const AdamRun::Result fp32 = run.step({3, 1e-3f}, 0.25f, false);
            for (float& g : run.gradient) g *= 1 + 0x1p-9f;
            const AdamRun::Result finer = run.step({3, 1e-3f}, 0.25f, false);
            CHECK(fp32.intact);
            CHECK(same_bytes(bf16.master, fp32.master));
            CHECK((!has_master || !same_bytes(finer.master, fp32.master)));
            for (size_t i = 0; i < run.params.size(); i++) {
                CHECK(same_bytes(bf16.m[i]->codes.read(), fp32.m[i]->codes.read()));
                CHECK(same_bytes(bf16.v[i]->codes.read(), fp32.v[i]->codes.read()));
                CHECK(bf16.amax[i].amax == fp32.amax[i].amax);
            }
        }
}

GPU_TEST_CASE("AdamW in every format of moments: weights, moments, codes, amax") {
    FRESH_RANDOM(rng);
    const std::pair<Format, bool> weights[] = {{Format::BF16, true}, {Format::F32, true}, {Format::BF16, false}};
    for (const auto& held : weights)
        for (const OptimizerFormat& o : OPTIMIZERS)
            for (const char* kind : {"normal", "exp of normal", "mostly zeros", "small normal", "equal magnitudes"}) {
                const Distribution& d = *std::find_if(distributions().begin(), distributions().end(), [&](auto& x) { return x.name == kind; });
                const bool has_master = held.second;
                CAPTURE(o.name);
                CAPTURE(d.name);
                CAPTURE(has_master);
                AdamRun run(rng, held.first, o, d, true);
                run.has_master = has_master;
                if (!has_master) run.master = rounded(Format::BF16, run.master);
                AdamW a{3, 1e-3f};
                const float scale = 0.25f;
                const AdamRun::Result r = run.step(a, scale, false), again = run.step(a, scale, false);
                CHECK(r.intact);
                CHECK(same_bytes(r.master, again.master));
                const double bias1 = 1 - std::pow(double(a.beta1), 3), bias2 = std::sqrt(1 - std::pow(double(a.beta2), 3));
                for (size_t i = 0; i < run.params.size(); i++) {
                    const HostParam& p = run.params[i];
                    CAPTURE(p.size);
                    Doubles m, v, em, ev, w(p.size), ew(p.size);
                    decode_exactly(p.m, p.size, m, em);
                    decode_exactly(p.v, p.size, v, ev);
                    float top = 0;
                    Floats got(p.size);
                    for (int64_t e = 0; e < p.size; e++) {
                        const double g = double(run.gradient[p.offset + e]) * scale, old = run.master[p.offset + e];
                        const double b1 = a.beta1, c1 = 1 - a.beta1, b2 = a.beta2, c2 = 1 - a.beta2;
                        em[e] = b1 * em[e] + 4 * U * (std::abs(b1 * m[e]) + std::abs(c1 * g)) + (m[e] != 0 || g != 0 ? 0x1p-147 : 0);
                        m[e] = b1 * m[e] + c1 * g;
                        ev[e] = b2 * ev[e] + 6 * U * (b2 * v[e] + c2 * g * g) + (v[e] != 0 || g != 0 ? 0x1p-147 : 0);
                        v[e] = b2 * v[e] + c2 * g * g;
                        const double root = std::sqrt(v[e]), root_error = v[e] > 0 ? std::min(ev[e] / root, std::sqrt(ev[e])) : std::sqrt(ev[e]);
                        const double below = root / bias2 + a.eps, update = m[e] / bias1 / below, decay = p.decays ? a.weight_decay : 0;
                        const double update_error = em[e] / bias1 / below + std::abs(update) * (root_error / bias2 / below + 32 * U);
                        w[e] = old - a.lr * (update + decay * old);
                        ew[e] = a.lr * (update_error + 8 * U * std::abs(decay * old)) + 4 * U * std::abs(w[e]) + 2 * U * std::abs(old);
                        got[e] = r.master[p.offset + e];
                        uint16_t bits = r.weight[p.offset + e];
                        top = std::max(top, std::abs(held.first == Format::F32 ? got[e] : reference::from_bf16(bits)));
                    }
                    if (has_master) check_close(got, w, ew);
                    else check_stochastic(got, w, ew, p.offset);
                    for (int64_t e = p.size; e < p.padded(); e++) REQUIRE(r.master[p.offset + e] == 0);
                    CHECK(r.amax[i].amax == top);
                    check_moment(*r.m[i], m, em, false, false);
                    check_moment(*r.v[i], v, ev, true, o.keep_positive);
                    CHECK(same_bytes(r.m[i]->codes.read(), again.m[i]->codes.read()));
                    CHECK(same_bytes(r.v[i]->codes.read(), again.v[i]->codes.read()));
                }
            }
}

// beta = 0 and no old state hand the kernel's encoder exactly g and g^2, so that its codes can be held against the reference's. Both take
// logarithms and powers in FP32: they may disagree where a power falls on the border between two codes, whose distance is at least
// 1/16 of the value. With an error d of the powers at most 2 * 16 d of the codes differ in expectation, each by one step.
GPU_TEST_CASE("FP8 moments have the reference's codes") {
    FRESH_RANDOM(rng);
    for (const OptimizerFormat& o : OPTIMIZERS) {
        if (!is_scaled(o.m) && !is_scaled(o.v)) continue;
        for (const Distribution& d : distributions()) {
            if (d.name == "huge" || d.name == "any magnitude") continue;  // their squares are no numbers
            CAPTURE(o.name);
            CAPTURE(d.name);
            const AdamRun run(rng, Format::F32, o, d, false);
            const AdamRun::Result r = run.step({1, 1e-3f, 0.0f, 0.0f}, 1.0f, false);
            int64_t groups = 0, other_k = 0, elements = 0, differ = 0, far = 0;
            double allowed = 0;
            for (size_t i = 0; i < run.params.size(); i++) {
                const HostParam& p = run.params[i];
                const float* g = &run.gradient[p.offset];
                Floats square(p.size);
                for (int64_t e = 0; e < p.size; e++) square[e] = g[e] * g[e];
                for (bool second : {false, true}) {
                    const DeviceMoment& got = second ? *r.v[i] : *r.m[i];
                    if (!is_scaled(got.format)) continue;
                    reference::Moment expected;
                    expected.init(got.format, o.expand, p.size, o.granularity);
                    expected.fit_tensor(p.size, second ? square.data() : g);
                    expected.store(0, p.size, second ? square.data() : g, second && o.keep_positive);
                    const Bytes codes = got.codes.read();
                    const Floats max = got.maxima(), k = o.expand ? got.k.read() : Floats(max.size(), 1.0f);
                    CHECK(same_bytes(max, expected.max));
                    for (size_t group = 0; group < max.size(); group++) {
                        groups++;
                        const float k_expected = o.expand ? expected.k[group] : 1.0f;
                        if (k[group] != k_expected) {
                            far += std::abs(k[group] - k_expected) > 1.0f / 16;
                            other_k++;
                            continue;
                        }
                        // The reference subtracts two logarithms, each rounded to u of its size.
                        const double size = max[group] > 0 ? std::abs(std::log2(max[group])) + 20 / k[group] : 0;
                        const double error = o.expand ? k[group] * (4 * U * size + 0x1p-20) + 0x1p-18 : 0;
                        const int64_t shared = got.group(p.size), first = static_cast<int64_t>(group) * shared;
                        for (int64_t e = first; e < std::min(p.size, first + shared); e++) {
                            const int code = code_at(got.format, codes, e), wanted = code_at(got.format, expected.codes, e);
                            elements++;
                            allowed += 32 * error;
                            differ += code != wanted;
                            far += std::abs(code - wanted) > 1;
                        }
                    }
                }
            }
            CAPTURE(elements);
            CAPTURE(differ);
            CHECK(differ <= allowed + 6 * std::sqrt(allowed));  // six standard deviations of so rare an event; 0 without expansion
            CHECK(far == 0);
            CHECK(other_k <= groups / 50 + 2);  // k falls on a multiple of 1/16 within 16 k^2 / range * the logarithms' error of 2^-16
        }
    }
}

GPU_TEST_CASE("a skipped step changes nothing and still leaves the weights' amax") {
    FRESH_RANDOM(rng);
    for (const auto& [stream, o] : {std::pair{Format::BF16, OPTIMIZERS[0]}, std::pair{Format::F32, OPTIMIZERS[0]}, std::pair{Format::BF16, FP8LM}}) {
        const AdamRun run(rng, stream, o, distributions()[0], true);
        CAPTURE(run.optimizer.name);
        const AdamRun::Result r = run.step({3, 1e-3f}, 1.0f, true);
        CHECK(same_bytes(r.master, run.master));
        for (size_t i = 0; i < run.params.size(); i++) {
            const HostParam& p = run.params[i];
            Bytes m = r.m[i]->codes.read(), v = r.v[i]->codes.read();
            m.resize(p.m.codes.size()), v.resize(p.v.codes.size());
            CHECK(same_bytes(m, p.m.codes));
            CHECK(same_bytes(v, p.v.codes));
            CHECK(same_bytes(r.m[i]->maxima(), p.m.max));
            float top = 0;
            for (int64_t e = 0; e < p.size; e++) {
                uint16_t weight;
                int16_t remainder;
                reference::split_master(run.master[p.offset + e], &weight, &remainder);
                top = std::max(top, std::abs(stream == Format::F32 ? run.master[p.offset + e] : reference::from_bf16(weight)));
            }
            CHECK(r.amax[i].amax == top);
        }
    }
}

GPU_TEST_CASE("what encoding the moments loses is measured as in the reference") {
    FRESH_RANDOM(rng);
    for (const OptimizerFormat& o : {OPTIMIZERS[0], OPTIMIZERS[1], FP8LM}) {
        CAPTURE(o.name);
        const AdamRun run(rng, Format::BF16, o, distributions()[0], true);
        const HostParam& p = run.params.back();
        const DeviceMoment m(p.m, p.padded()), v(p.v, p.padded());
        Buffer<QuantStats> stats(2);
        stats.zero();
        const Tensor g(run.gradient, Format::BF16);
        gpu::measure_moments(o, {p.offset, p.size, m.view(), v.view(), true, nullptr}, static_cast<uint16_t*>(static_cast<void*>(g.codes.get())) + p.offset, Format::BF16, stats.get(), stats.get() + 1, 0);
        QuantStats expected[2];
        Floats hm(p.size), hv(p.size), unused(p.size);
        p.m.load(0, p.size, hm.data());
        p.v.load(0, p.size, hv.data());
        reference::adamw(reference::adamw_factors({1, 0.0f}, false, 0), p.size, &run.gradient[p.offset], unused.data(), hm.data(), hv.data());
        reference::Moment after_m = p.m, after_v = p.v;
        after_m.fit_tensor(p.size, hm.data());
        after_v.fit_tensor(p.size, hv.data());
        after_m.store(0, p.size, hm.data(), false, &expected[0]);
        after_v.store(0, p.size, hv.data(), o.keep_positive, &expected[1]);
        const auto got = stats.read();
        for (int i : {0, 1}) {
            CHECK(got[i].elements == expected[i].elements);
            CHECK(got[i].flushed == expected[i].flushed);
            CHECK(got[i].signal == doctest::Approx(expected[i].signal).epsilon(1e-5));  // decoded moments differ by a few 1e-6
            // A code that differs adds or takes away a step's error: 50000 elements, at most a few in a thousand. A k that differs, 2% of a group.
            CHECK(got[i].noise == doctest::Approx(expected[i].noise).epsilon(0.02));
        }
        CHECK(same_bytes(m.maxima(), p.m.max));
        CHECK(same_bytes(v.maxima(), p.v.max));
    }
}
