// quantized_outputs.h - checks of the quantized outputs of a kernel, for the tests of fused kernels.
//
// A fused kernel computes a tensor and quantizes it in one pass. It is checked in two steps: its FP32 values
// against double, within bounds; then its codes and scales, byte for byte, against the CPU reference's
// quantization of those FP32 values. Outputs start as NaN, and guard bytes after them must not change (gpu.h,
// Buffer).
#pragma once
#include <cmath>

#include "../coat.cuh"
#include "device_tensors.h"
#include "gpu.h"
#include "random.h"

namespace coat::test::quantized_outputs {

using gpu::Lazy;
using gpu::Operand;
using gpu::AmaxAndScale;
using namespace coat::test::device_tensors;

// Checks codes, scales and transpose (per-tensor scaling) or codes and scales (groups) against the
// reference's quantization of x.
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

// An operand with per-row, 1x128 or 128x128 scaling. The row-major and the transposed codes each have their
// own scales.
struct BlockOperand {
    Quant quant;
    int64_t rows, cols;
    Buffer<uint8_t> codes, transposed_codes;
    Buffer<float> scales, transposed_scales;
    Buffer<AmaxAndScale> amax;

    BlockOperand(int64_t rows, int64_t cols, Quant q)
        : quant(q), rows(rows), cols(cols), codes(q.code_bytes(rows, cols)),
          transposed_codes(q.code_bytes(rows, cols)),
          scales(q.operand_scales(rows, cols)), transposed_scales(q.operand_scales(cols, rows)), amax(1) {
        amax.zero();
    }
    Operand operand() const {
        const View row_major{codes.get(), scales.get(), rows, cols, quant};
        return {row_major, transposed_codes.get(), transposed_scales.get(), amax.get()};
    }
    bool intact() const {
        return codes.intact() && transposed_codes.intact() && scales.intact() && transposed_scales.intact() &&
               amax.intact();
    }
};
inline const Quant BLOCK_OUTPUTS[] = {Q_ROW,
                                      Q_1x128,
                                      Q_128x128,
                                      {Format::E5M2, PER_ROW},
                                      {Format::E5M2, PER_1x128},
                                      {Format::E5M2, PER_128x128}};

// Checks codes and scales of one orientation against the reference's quantization of x. Scales are in
// cuBLASLt's layout.
inline void check_orientation(const Floats& x, int64_t rows, int64_t cols, Quant q, const Bytes& codes,
                              const Floats& scales) {
    const reference::Quantized expected = reference::quantize(x.data(), rows, cols, q);
    CHECK(same_codes(q.format, codes, expected.codes));
    const Floats laid_out = scales_for_gemm(expected);
    CHECK(same_bytes(scales, laid_out));
}
inline void check_blocks(const BlockOperand& out, const Floats& x) {
    CHECK(out.intact());
    check_orientation(x, out.rows, out.cols, out.quant, out.codes.read(), out.scales.read());
    const Floats transpose = transposed(x, out.rows, out.cols);
    check_orientation(transpose, out.cols, out.rows, out.quant, out.transposed_codes.read(),
                      out.transposed_scales.read());
    const float got = out.amax.read()[0].amax, wanted = reference::amax(x.data(), out.rows * out.cols);
    CHECK((got == wanted || (!std::isfinite(got) && !std::isfinite(wanted))));
}

// Checks column_sums(x): values are x's FP32 values.
inline void check_column_sums(const Lazy& x, const Floats& values, bool with_amax) {
    const int64_t rows = x.rows, cols = x.cols;
    const Floats before(cols, 0.5f);
    Tensor sums(before, Format::F32);
    Buffer<float> workspace(gpu::COLUMN_PARTIALS * cols);
    Buffer<AmaxAndScale> amax(1);
    amax.zero();
    gpu::column_sums(x, sums.view(), workspace.get(), with_amax ? amax.get() : nullptr, 0);
    CHECK(amax.read()[0].amax == (with_amax ? reference::amax(values.data(), rows * cols) : 0));
    Doubles total(cols, 0.5), sizes(cols, 0.5);
    for (int64_t i = 0; i < rows * cols; i++) {
        const double v = values[i];
        total[i % cols] += v;
        sizes[i % cols] += std::abs(v);
    }
    // FP32 additions: first over the rows of a strip, then over at most 128 strips.
    for (double& s : sizes) s *= (static_cast<double>(rows) / 100 + 200) * U;
    check_close(sums.values(), total, sizes);
    CHECK(workspace.intact());
}

// The two steps for a lazily computed tensor. Its FP32 values are checked against `expected`. Everything else
// is checked against those values: amax, FP8 codes, scales, transposes, rounding to BF16, column sums. FP8
// needs the compute dtype BF16.
inline void check_lazy(const Lazy& x, Format compute, const Doubles& expected, const Doubles& bound) {
    const int64_t rows = x.rows, cols = x.cols;
    Tensor exact(rows, cols, Q_F32), bf16(rows, cols, Q_BF16);
    gpu::quantize(x, exact.operand(), nullptr, 0);
    const Floats values = exact.values();
    check_close(values, expected, bound);
    CHECK(exact.intact());
    check_column_sums(x, values, true), check_column_sums(x, values, false);
    if (compute == Format::F32) {
        CHECK_THROWS_AS(gpu::amax(x, bf16.amax_and_scale(), 0), Error);
        return;
    }
    gpu::quantize(x, bf16.operand(), nullptr, 0);
    CHECK(bf16.intact());
    CHECK(same_bytes(bf16.values(), rounded(Format::BF16, values)));
    for (Quant q : FP8_OUTPUTS) {  // per-tensor scaling, just in time
        Tensor out(rows, cols, q), again(rows, cols, q);
        for (Tensor* t : {&out, &again}) {
            gpu::amax(x, t->amax_and_scale(), 0);
            gpu::quantize(x, t->operand(), nullptr, 0);
        }
        CHECK(out.amax() == reference::amax(values.data(), rows * cols));
        check_quantized(out, values, rows, cols, q);
        CHECK(same_bytes(out.codes.read(), again.codes.read()));
        Tensor transposed_only(rows, cols, q);
        transposed_only.scales.write(out.scales.read());
        Operand operand = transposed_only.operand();
        operand.view.data = nullptr;
        gpu::quantize(x, operand, nullptr, 0);
        CHECK(same_bytes(transposed_only.transposed.read(), out.transposed.read()));
    }
    for (Quant q : BLOCK_OUTPUTS) {  // both orientations in one launch, and each of them alone
        CAPTURE(q.text());
        const BlockOperand out(rows, cols, q), row_major_only(rows, cols, q), transposed_only(rows, cols, q);
        gpu::quantize(x, out.operand(), nullptr, 0);
        check_blocks(out, values);
        Operand row_major = row_major_only.operand(), transpose = transposed_only.operand();
        row_major.transposed = row_major.transposed_scales = nullptr;
        transpose.view.data = transpose.view.scales = nullptr;
        gpu::quantize(x, row_major, nullptr, 0);
        gpu::quantize(x, transpose, nullptr, 0);
        CHECK(same_bytes(row_major_only.codes.read(), out.codes.read()));
        CHECK(same_bytes(row_major_only.scales.read(), out.scales.read()));
        CHECK(same_bytes(transposed_only.transposed_codes.read(), out.transposed_codes.read()));
        CHECK(same_bytes(transposed_only.transposed_scales.read(), out.transposed_scales.read()));
    }
    for (Quant q : FP8_OUTPUTS) {  // delayed scaling with half of the amax, so that some values saturate
        Tensor out(rows, cols, q);
        const float scale = reference::scale_of(q, reference::amax(values.data(), rows * cols) / 2);
        succeeded(
            cudaMemcpy(&out.amax_and_scale()->from_history, &scale, sizeof scale, cudaMemcpyHostToDevice));
        gpu::quantize(x, out.operand(), nullptr, 0);
        const reference::Quantized wanted =
            reference::quantize(values.data(), rows, cols, q, nullptr, &scale);
        CHECK(same_codes(q.format, out.codes.read(), wanted.codes));
        CHECK(same_codes(q.format, out.transposed.read(), transposed(wanted.codes, rows, cols)));
        CHECK(out.scale() == scale);
        CHECK(out.amax() == reference::amax(values.data(), rows * cols));
        CHECK(out.intact());
    }
}

}  // namespace coat::test::quantized_outputs
