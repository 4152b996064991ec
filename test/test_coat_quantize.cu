// test_coat_quantize.cu - the quantizers of coat.cu against the CPU reference, byte for byte (but for codes
// of NaN): amax, quantize, convert and transpose_codes; with the scales of gpu/other_scaling.cu too. Random
// values come from random.h, tensors and shapes from device_tensors.h, formats from quantized_outputs.h.
#include <cmath>

#include "../coat.cuh"
#include "device_tensors.h"
#include "gpu.h"
#include "quantized_outputs.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using gpu::Lazy;
using gpu::Operand;
using gpu::AmaxAndScale;
using namespace coat::test::device_tensors;
using namespace coat::test::quantized_outputs;

GPU_TEST_CASE("quantize and convert: codes, scales and transposes equal the reference byte for byte") {
    FRESH_RANDOM(rng);
    for (const Distribution& d : distributions())
        for (Shape s : SHAPES) {
            if (too_long(s.rows * s.cols)) continue;
            CAPTURE(d.name);
            CAPTURE(s.rows);
            const Floats x = rounded(Format::BF16, sample(d, rng, s.rows * s.cols));
            const Tensor in(x, s.rows, s.cols, Q_BF16);
            for (Quant q : {Q_E4M3, Q_E5M2, Q_GROUP}) {
                Tensor out(s.rows, s.cols, q);
                const bool groups = q.granularity == PER_GROUP;
                if (!groups) gpu::amax(gpu::stored(in.view()), out.amax_and_scale(), 0);
                gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
                check_quantized(out, x, s.rows, s.cols, q);
                if (!groups) CHECK(out.amax() == reference::amax(x.data(), s.rows * s.cols));
                if (!groups) continue;
                Tensor fp32(s.rows, s.cols, Q_F32), bf16(s.rows, s.cols, Q_BF16);
                gpu::convert(out.view(), fp32.view(), 0);
                gpu::convert(out.view(), bf16.view(), 0);
                CHECK(same_bytes(fp32.values(), out.values()));
                CHECK(same_bytes(bf16.values(), rounded(Format::BF16, out.values())));
                CHECK(fp32.intact());
            }
            for (Quant q : BLOCK_OUTPUTS) {
                CAPTURE(q.text());
                const BlockOperand out(s.rows, s.cols, q);
                gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
                check_blocks(out, x);
            }
        }
}

GPU_TEST_CASE("transpose_codes: the transposed codes that quantize writes") {
    FRESH_RANDOM(rng);
    for (Shape s : SHAPES) {
        const Tensor in(normals(rng, Format::BF16, s.rows * s.cols), s.rows, s.cols, Q_BF16);
        Tensor out(s.rows, s.cols, Q_E4M3);
        gpu::amax(gpu::stored(in.view()), out.amax_and_scale(), 0);
        gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
        const Buffer<uint8_t> transposed(s.rows * s.cols);
        gpu::transpose_codes(out.view(), transposed.get(), 0);
        CHECK(same_bytes(transposed.read(), out.transposed.read()));
        CHECK(transposed.intact());
    }
}

GPU_TEST_CASE("quantize: FP32 values to FP32 and BF16; FP32 values to FP8 are an error") {
    FRESH_RANDOM(rng);
    for (Shape s : SHAPES) {
        if (too_long(s.rows * s.cols)) continue;
        const Floats x = heavy(rng, Format::F32, s.rows * s.cols);
        const Tensor in(x, s.rows, s.cols, Q_F32), same(s.rows, s.cols, Q_F32), bf16(s.rows, s.cols, Q_BF16);
        gpu::quantize(gpu::stored(in.view()), same.operand(), nullptr, 0);
        gpu::quantize(gpu::stored(in.view()), bf16.operand(), nullptr, 0);
        CHECK(same_bytes(same.values(), x));
        CHECK(same_bytes(bf16.values(), rounded(Format::BF16, x)));
        for (Quant q : {Q_E4M3, Q_GROUP, Q_ROW}) {
            const Tensor out(s.rows, s.cols, q);
            CHECK_THROWS_AS(gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0), Error);
        }
    }
}

GPU_TEST_CASE("quantize: every BF16 value up to 448 has the reference's E4M3 code") {
    Floats x;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const float value = reference::from_bf16(static_cast<uint16_t>(bits));
        if (std::abs(value) <= 448) x.push_back(value);
    }
    x.resize(round_up(x.size(), 16), 0.0f);
    const int64_t n = static_cast<int64_t>(x.size());
    const Tensor in(x, 1, n, Q_BF16);
    Tensor out(1, n, Q_E4M3);
    gpu::amax(gpu::stored(in.view()), out.amax_and_scale(), 0);
    gpu::quantize(gpu::stored(in.view()), out.operand(), nullptr, 0);
    CHECK(out.scale() == 1.0f);
    check_quantized(out, x, 1, n, Q_E4M3);
}

GPU_TEST_CASE(
    "amax and quantize: NaN and infinity reach the amax; a per-tensor scale is 1, a block's scale NaN") {
    FRESH_RANDOM(rng);
    for (float bad : {INFINITY, -INFINITY, NAN})
        for (Quant q : {Q_E4M3, Q_E5M2, Q_GROUP}) {
            Floats x = normals(rng, Format::BF16, 200 * 160);
            x[rng.below(200 * 160)] = bad;
            const Tensor in(x, 200, 160, Q_BF16);
            Tensor out(200, 160, q);
            if (q.granularity == PER_TENSOR) gpu::amax(gpu::stored(in.view()), out.amax_and_scale(), 0);
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
            CHECK(!std::isfinite(out.amax.read()[0].amax));
        }
}

GPU_TEST_CASE("quantize: in place with a delayed scale, the amax is that of the input values") {
    // The codes replace the elements of gate_up from which they are computed. A thread handles eight rows. At
    // the end of the tensor it may read its last row again after it has written codes there. The inputs are
    // such that this would change the amax: small gates share a group with a large one, their gradients have
    // large codes, and these would be read as gates. dup = dact silu(gate), dgate = dact up silu'(gate).
    const int64_t F = 64;
    for (int64_t rows : {3, 130, 131, 133}) {
        Floats gate_up(rows * 2 * F), dact(rows * F);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < F; c++) {
                const bool large = c % 16 == 0;
                gate_up[r * 2 * F + c] = large ? 400.0f : 1.0f, gate_up[r * 2 * F + F + c] = 1.0f;
                dact[r * F + c] = large ? 0x1p-14f : 1.0f;
            }
        const Tensor in(gate_up, rows, 2 * F, Q_GROUP), gradient(dact, rows, F, Q_BF16);
        const Lazy x = gpu::activation_backward(true, in.view(), gradient.view());
        Tensor values(rows, 2 * F, Q_F32), out(rows, 2 * F, Q_E5M2);
        gpu::quantize(x, values.operand(), nullptr, 0);
        const Floats exact = values.values();
        const float amax = reference::amax(exact.data(), rows * 2 * F),
                    scale = reference::scale_of(Q_E5M2, amax);
        succeeded(
            cudaMemcpy(&out.amax_and_scale()->from_history, &scale, sizeof scale, cudaMemcpyHostToDevice));
        Operand operand = out.operand();
        operand.view.data = in.codes.get();
        gpu::quantize(x, operand, nullptr, 0);
        INFO(rows);
        CHECK(out.amax() == amax);
        const reference::Quantized wanted =
            reference::quantize(exact.data(), rows, 2 * F, Q_E5M2, nullptr, &scale);
        CHECK(same_codes(Format::E5M2, in.codes.read(), wanted.codes));
    }
}
