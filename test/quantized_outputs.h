// quantized_outputs.h - checks of the quantized outputs of a kernel, for the tests of fused kernels.
//
// A fused kernel is checked in two steps: first its FP32 values against double, then its codes, byte for byte, against the
// CPU reference's quantization of those values. Outputs are poisoned first, and nothing may be written behind them.
#pragma once
#include <cmath>

#include "../coat.cuh"
#include "device_tensors.h"
#include "gpu.h"
#include "random.h"

namespace coat::test::quantized_outputs {

using gpu::Lazy;
using gpu::Operand;
using gpu::TensorScale;
using namespace coat::test::device_tensors;

// Codes, scale and transpose of what a kernel quantized against the reference's quantization of the same values.
inline void check_quantized(const Tensor& out, const Floats& x, int64_t rows, int64_t cols, Quant q) {
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
inline const Quant BLOCK_OUTPUTS[] = {Q_ROW, Q_1x128, Q_128x128, {Format::E5M2, PER_ROW}, {Format::E5M2, PER_1x128}, {Format::E5M2, PER_128x128}};

// The reference's quantization of x, one way, against codes and against scales where cuBLAS wants them.
inline void check_way(const Floats& x, int64_t rows, int64_t cols, Quant q, const Bytes& codes, const Floats& scales) {
    const reference::Quantized expected = reference::quantize(x.data(), rows, cols, q);
    CHECK(same_codes(q.format, codes, expected.codes));
    const Floats laid_out = scales_for_products(expected);
    CHECK(same_bytes(scales, laid_out));
}
inline void check_blocks(const BlockOperand& out, const Floats& x) {
    CHECK(out.intact());
    check_way(x, out.rows, out.cols, out.quant, out.codes.read(), out.scales.read());
    check_way(transposed(x, out.rows, out.cols), out.cols, out.rows, out.quant, out.transposed_codes.read(), out.transposed_scales.read());
    const float amax = out.slot.read()[0].amax, wanted = reference::amax(x.data(), out.rows * out.cols);
    CHECK((amax == wanted || (!std::isfinite(amax) && !std::isfinite(wanted))));
}

inline void check_column_sums(const Lazy& x, const Floats& values, bool with_amax) {
    const int64_t rows = x.rows, cols = x.cols;
    for (Format rounding : {Format::F32, Format::BF16}) {
        const Floats before(cols, 0.5f);
        Tensor sums(before, Format::F32);
        Buffer<float> workspace(gpu::COLUMN_PARTIALS * cols);
        Buffer<TensorScale> amax(1);
        amax.zero();
        gpu::column_sums(x, rounding, sums.view(), workspace.get(), with_amax ? amax.get() : nullptr, 0);
        CHECK(amax.read()[0].amax == (with_amax ? reference::amax(values.data(), rows * cols) : 0));
        Doubles total(cols, 0.5), sizes(cols, 0.5);
        for (int64_t i = 0; i < rows * cols; i++) {
            const double v = reference::round_to(rounding, values[i]);
            total[i % cols] += v;
            sizes[i % cols] += std::abs(v);
        }
        // Additions one after another in a strip of rows, and then of strips.
        for (double& s : sizes) s *= (static_cast<double>(rows) / 100 + 200) * U;
        check_close(sums.values(), total, sizes);
        CHECK(workspace.intact());
    }
}

// The two steps above for a lazily computed tensor: FP32 values against `expected`; then, against those values, amax, FP8
// codes, transposes, rounding to BF16 and, for gradients, column sums. FP8 goes with the compute dtype BF16, and E5M2 with gradients.
inline void check_computed(const Lazy& x, Format compute, const Doubles& expected, const Doubles& bound) {
    const int64_t rows = x.rows, cols = x.cols;
    const bool gradient = x.op == gpu::LazyOp::Stored || x.op == gpu::LazyOp::ActivationBackward;
    Tensor exact(rows, cols, Q_F32), half(rows, cols, Q_BF16);
    gpu::quantize(x, exact.operand(), nullptr, 0);
    const Floats values = exact.values();
    check_close(values, expected, bound);
    CHECK(exact.intact());
    if (gradient) check_column_sums(x, values, true), check_column_sums(x, values, false);
    if (compute == Format::F32) {
        CHECK_THROWS_AS(gpu::amax(x, half.slot(), 0), Error);
        return;
    }
    gpu::quantize(x, half.operand(), nullptr, 0);
    CHECK(half.intact());
    CHECK(same_bytes(half.values(), rounded(Format::BF16, values)));
    for (Quant q : FP8_OUTPUTS) {
        if (q.format == Format::E5M2 && !gradient) continue;
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
    for (Quant q : FP8_OUTPUTS) {  // with a delayed scale, beyond which some values saturate
        if (q.format == Format::E5M2 && !gradient) continue;
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
}

}  // namespace coat::test::quantized_outputs
