// coat.cu - tests of the quantizers in ../coat.cu and gpu/other_scaling.cu, and of the statistics in
// gpu/quant_report.cu. Codes and scales must equal the CPU reference's byte for byte; the codes of NaN may
// differ.
//
// To add a test of a kernel, begin with gpu/first.cu. Tensors of any format and the comparisons are in
// help/gpu.h.
#include "../gpu/other_scaling.h"
#include "help/gpu.h"

using namespace coat;
using namespace coat::test;

const std::vector<Shape> SHAPES =
    shapes({{1, 16}, {7, 48}, {16, 128}, {100, 112}, {144, 144}, {128, 256}, {257, 400}, {272, 400}});

// A quantizer adds its statistics of errors to those of earlier tensors. In these tests they begin with
// BEFORE.
constexpr QuantStats BEFORE{.signal = 0.5, .noise = 0.25, .elements = 3, .saturated = 2, .flushed = 1};
static void check_statistics(const Buffer<QuantStats>& stats, QuantStats wanted) {
    const QuantStats got = stats.read()[0];
    CHECK(got.elements == BEFORE.elements + wanted.elements);
    CHECK(got.saturated == BEFORE.saturated + wanted.saturated);
    CHECK(got.flushed == BEFORE.flushed + wanted.flushed);
    if (!std::isfinite(wanted.noise)) return;
    // These are sums of doubles, which the GPU adds in another order.
    CHECK(got.signal == doctest::Approx(BEFORE.signal + wanted.signal).epsilon(1e-10));
    CHECK(got.noise == doctest::Approx(BEFORE.noise + wanted.noise).epsilon(1e-10));
}

// Quantizes a stored tensor, in groups or as an operand. With one scale per tensor its amax is taken first.
static void quantize(const TensorRef& x, const Tensor& out, QuantStats* stats = nullptr) {
    if (out.format == E4M3_PER_1x16) {
        gpu::quantize_to_groups(x, out.ref(), /*write_back=*/false, stats, 0);
        return;
    }
    if (out.per_tensor()) gpu::compute_amax(gpu::lazy_load(x), out.amax_to_raise(), 0);
    gpu::quantize_operand(gpu::lazy_load(x), out.operand(), stats, 0);
}

// `groups` are x in 1x16 groups. The values that they hold must come back from write_values(), be written
// back by quantize_to_groups(), and be what an operand is quantized from.
static void check_groups(const Floats& x, const Tensor& groups) {
    const Floats values = groups.values();
    const Shape s{groups.rows, groups.cols};
    const Tensor fp32(s, PLAIN_FP32), bf16(s, PLAIN_BF16);
    gpu::write_values(lazy_load(groups.ref()), fp32.ref(), 0);
    gpu::write_values(lazy_load(groups.ref()), bf16.ref(), 0);
    CHECK(same_values(fp32.values(), values));
    CHECK(same_values(bf16.values(), rounded(Format::BF16, values)));
    const Tensor in(x, s, PLAIN_BF16), again(s, E4M3_PER_1x16);
    const bool write_back = true;
    gpu::quantize_to_groups(in.ref(), again.ref(), write_back, nullptr, 0);
    check_quantized(again, x);
    CHECK(same_bytes(in.values(), bf16.values()));
    // An operand is quantized from the groups' values, not from these rounded to BF16.
    const Tensor operand(s, E4M3_PER_TENSOR);
    quantize(groups.ref(), operand);
    check_quantized(operand, values);
}

// Checks codes, scales, transposes, amaxes and statistics of x (BF16) in every format.
static void check_all_formats(const Floats& x, Shape s) {
    const Tensor in(x, s, PLAIN_BF16);
    std::vector<TensorFormat> formats(std::begin(GEMM_FORMATS), std::end(GEMM_FORMATS));
    formats.push_back(E4M3_PER_1x16);
    for (TensorFormat q : formats) {
        const Tensor out(s, q);
        const Buffer<QuantStats> stats({BEFORE});
        quantize(in.ref(), out, stats.get());
        check_quantized(out, x);
        QuantStats wanted;
        reference::quantize(x.data(), s.rows, s.cols, q, {.stats = &wanted});
        // A transpose with other scale blocks has its own scales and errors.
        if (out.transposes() && !q.granularity.transpose_has_same_blocks())
            reference::quantize(transposed(x, s.rows, s.cols).data(), s.cols, s.rows, q, {.stats = &wanted});
        check_statistics(stats, wanted);
        if (q == E4M3_PER_1x16) check_groups(x, out);
    }
}

// Checks both passes of an activation. `values` are its input, which is stored as the recipe says, and d is
// the gradient of its output.
static void check_activation(RecipeFormats formats, bool gated, Shape s, const Floats& values,
                             const Floats& d) {
    const Tensor gate_up(values, {s.rows, s.cols * (gated ? 2 : 1)}, formats.saved_inputs);
    const Tensor dact(d, s, TensorFormat{formats.compute});
    const Floats x = gate_up.values();
    auto forward = [&](const auto& in) {
        auto act = in;
        act.resize(s.n());
        reference::activation_forward(gated, s.rows, s.cols, in.data(), act.data());
        return act;
    };
    auto backward = [&](const auto& in, const auto& gradient) {
        auto dx = in;
        reference::activation_backward(gated, s.rows, s.cols, in.data(), gradient.data(), dx.data());
        return dx;
    };
    check_lazy(gpu::lazy_activation(gated, gate_up.ref()), formats.compute, forward(doubles(x)), forward(x));
    check_lazy(gpu::lazy_activation_backward(gated, gate_up.ref(), dact.ref()), formats.compute,
               backward(doubles(x), doubles(d)), backward(x, d));
}

GPU_TEST_CASE("quantize: codes and scales and statistics in every format") {
    SEEDED_RANDOM(rng);
    for (Shape s : SHAPES) {
        for (const Distribution& d : distributions()) {
            CAPTURE(d.name);
            check_all_formats(rounded(Format::BF16, sample(d, rng, s.n())), s);
        }
        for (float bad : {INFINITY, -INFINITY, NAN}) {
            CAPTURE(bad);
            Floats x = normals(rng, Format::BF16, s.n());
            x[rng.below(s.n())] = bad;
            check_all_formats(x, s);
        }
    }
    Floats every;  // BF16 value of at most 448, so that the scale is 1
    for (uint32_t bits = 0; bits < 65536; bits++)
        if (const float x = reference::from_bf16(uint16_t(bits)); std::abs(x) <= 448) every.push_back(x);
    every.resize(round_up(int64_t(every.size()), 16), 0.0f);
    check_all_formats(every, {1, int64_t(every.size())});
}

GPU_TEST_CASE("write_values: FP32 values to FP32 and BF16; quantize: FP32 values to FP8 are an error") {
    SEEDED_RANDOM(rng);
    for (Shape s : SHAPES) {
        const Floats x = heavy(rng, Format::FP32, s.n());
        const Tensor in(x, s, PLAIN_FP32);
        for (TensorFormat q : {PLAIN_FP32, PLAIN_BF16}) {
            const Tensor out(s, q);
            gpu::write_values(gpu::lazy_load(in.ref()), out.ref(), 0);
            check_quantized(out, x);
        }
        for (TensorFormat q : {E4M3_PER_TENSOR, E4M3_PER_ROW}) {
            const Tensor out(s, q);
            CHECK_THROWS_AS(gpu::quantize_operand(gpu::lazy_load(in.ref()), out.operand(), nullptr, 0),
                            Error);
        }
        const Tensor groups(s, E4M3_PER_1x16);
        const bool write_back = false;
        CHECK_THROWS_AS(gpu::quantize_to_groups(in.ref(), groups.ref(), write_back, nullptr, 0), Error);
    }
}

// With a delayed scale, values beyond FMAX saturate. Those up to half a step beyond it are rounded to
// it, as any value is to its neighbour; they do not count as saturated.
GPU_TEST_CASE("quantize: statistics with a delayed scale that is too small") {
    SEEDED_RANDOM(rng);
    const int64_t rows = 300, cols = 272;
    for (TensorFormat q : {E4M3_PER_TENSOR, E5M2_PER_TENSOR}) {
        CAPTURE(q.text());
        const float fmax = format_info(q.element_format).fmax, scale = 0x1p-8f;
        const float half_step = std::ldexp(fmax / 1.75f, -format_info(q.element_format).mantissa_bits - 1);
        Floats x = heavy(rng, Format::BF16, rows * cols);
        for (int64_t i = 0; i < 100; i++)
            x[rng.below(rows * cols)] = (fmax + float(i % 7 - 3) / 2 * half_step) * scale;
        const Tensor in(x, {rows, cols}, PLAIN_BF16);
        const Tensor out({rows, cols}, q, scale);
        const Buffer<QuantStats> stats({BEFORE});
        gpu::quantize_operand(gpu::lazy_load(in.ref()), out.operand(), stats.get(), 0);
        check_quantized(out, x, scale);
        QuantStats wanted;
        reference::quantize(x.data(), rows, cols, q, {.stats = &wanted, .scale = scale});
        check_statistics(stats, wanted);
    }
}

GPU_TEST_CASE("quantize: rows of padding do not change the codes and scales of the others") {
    SEEDED_RANDOM(rng);
    const int64_t rows = 21, padded = 32, cols = 272;
    Floats x = heavy(rng, Format::BF16, rows * cols);
    const Tensor in(x, {rows, cols}, PLAIN_BF16);
    x.resize(padded * cols);  // the reference has zeros as padding, whose codes the GPU does not write
    for (TensorFormat q : {E4M3_PER_TENSOR, E4M3_PER_ROW, E4M3_PER_1x128, E4M3_PER_128x128}) {
        CAPTURE(q.text());
        const Tensor out({padded, cols}, q);
        Operand operand = out.operand();
        operand.transposed = nullptr;
        if (out.per_tensor()) gpu::compute_amax(gpu::lazy_load(in.ref()), out.amax_to_raise(), 0);
        gpu::quantize_operand(gpu::lazy_load(in.ref()), operand, nullptr, 0);
        reference::StoredMatrix wanted = reference::quantize(x.data(), padded, cols, q);
        std::fill(wanted.elements.begin() + rows * cols, wanted.elements.end(), 0xFF);
        CHECK(out.codes.read() == wanted.elements);
        CHECK(same_bytes(out.scales.read(), stored_scales(wanted)));
    }
}

GPU_TEST_CASE("activation and activation_backward: values and everything that is made of them") {
    SEEDED_RANDOM(rng);
    const float sizes[] = {1, 4, 9, 11, 12, 88, 90, 1e3f, 1e10f, 1e20f, 1e30f, 3e38f};
    const int64_t rows = std::size(sizes), cols = 16;
    for (RecipeFormats formats : RECIPE_FORMATS)
        for (bool gated : {true, false}) {
            INFO(format_info(formats.compute).name, gated ? " gated" : "");
            for (Shape s : shapes({{1, 16}, {33, 48}, {144, 144}, {256, 352}})) {
                const int64_t inputs = gated ? 2 * s.n() : s.n();
                const Floats d = heavy(rng, formats.compute, s.n());
                check_activation(formats, gated, s, heavy(rng, formats.compute, inputs), d);
                // Normal values show small errors that are lost beside an outlier of the same row.
                check_activation(formats, gated, s, normals(rng, formats.compute, inputs), d);
            }
            Floats values;  // a row for each size, with both signs; up is 1
            for (float size : sizes) {
                for (int64_t c = 0; c < cols; c++) values.push_back(c % 2 ? -size : size);
                if (gated) values.insert(values.end(), cols, 1.0f);
            }
            check_activation(formats, gated, {rows, cols}, rounded(formats.compute, values),
                             Floats(rows * cols, 1.0f));
        }
}

GPU_TEST_CASE("quantize_activation_input: 1x16 groups and the amax of the activation's output") {
    SEEDED_RANDOM(rng);
    for (bool gated : {true, false})
        for (Shape s : shapes({{1, 32}, {33, 96}, {130, 288}, {256, 704}})) {
            INFO(s.cols, gated ? " gated" : "");
            Floats x = heavy(rng, Format::BF16, s.n());
            // A thread beyond the end of this row loads eight columns that another thread has. In the other's
            // group 15 is rounded; in its own it would be exact, and must not enter the amax.
            if (s.rows == 1) {
                x.assign(32, 0);
                x[0] = 400;
                x[8] = 15;
                x[24] = 1;
            }
            const Tensor gate_up(x, s, PLAIN_BF16), groups(s, E4M3_PER_1x16);
            const Tensor fused({1, 16}, E4M3_PER_TENSOR),
                separate({1, 16}, E4M3_PER_TENSOR);  // for their amaxes
            gpu::quantize_activation_input(gated, gate_up.ref(), groups.ref(), fused.amax_to_raise(), nullptr,
                                           0);
            check_quantized(groups, x);
            const bool write_back = false;
            gpu::quantize_to_groups(gate_up.ref(), groups.ref(), write_back, nullptr, 0);
            CHECK(same_values(gate_up.values(), x));
            gpu::compute_amax(gpu::lazy_activation(gated, groups.ref()), separate.amax_to_raise(), 0);
            CHECK(fused.amax() == separate.amax());
            CHECK(fused.amax() > 0);
        }
}

// 128 tiles are 16384 rows: with more of them, some blocks add up two tiles.
GPU_TEST_CASE(
    "write_operand_and_add_column_sums: codes and sums have the bits of quantize and add_column_sums") {
    SEEDED_RANDOM(rng);
    for (Shape s : shapes({{1, 16}, {144, 144}, {272, 400}, {16640, 48}}))
        for (TensorFormat q : {E5M2_PER_TENSOR, E4M3_PER_TENSOR, E4M3_PER_1x128, PLAIN_BF16}) {
            CAPTURE(s.rows);
            CAPTURE(q.text());
            const Floats x = heavy(rng, Format::BF16, s.n()), before = normals(rng, Format::FP32, s.cols);
            const Tensor in(x, s, PLAIN_BF16), out(s, q), wanted_sums(before, Format::FP32),
                sums(before, Format::FP32);
            const Buffer<float> workspace(gpu::COLUMN_PARTIALS * s.cols);
            gpu::add_column_sums(gpu::lazy_load(in.ref()), wanted_sums.ref(), workspace.get(), nullptr, 0);
            if (out.per_tensor()) gpu::compute_amax(gpu::lazy_load(in.ref()), out.amax_to_raise(), 0);
            const Buffer<QuantStats> stats({BEFORE});
            gpu::write_operand_and_add_column_sums(gpu::lazy_load(in.ref()), out.operand(), sums.ref(),
                                                   workspace.get(), stats.get(), 0);
            check_quantized(out, x);
            CHECK(same_bytes(sums.values(), wanted_sums.values()));
            QuantStats wanted;
            reference::quantize(x.data(), s.rows, s.cols, q, {.stats = &wanted});
            if (out.per_tensor()) check_statistics(stats, wanted);
        }
}

GPU_TEST_CASE("quantize: in place with a delayed scale; the amax is that of the input values") {
    // dup = dact silu(gate) and dgate = dact up silu'(gate); their codes replace those of gate and up, from
    // which they are computed. A thread handles eight rows. At the end of the tensor it must not read its
    // last row again, after it has written codes there. With these inputs that would change the amax: small
    // gates share a group with a large one, and the large codes of their gradients would be read as gates.
    const int64_t F = 64;
    for (int64_t rows : {3, 130, 131, 133}) {
        CAPTURE(rows);
        Floats gate_up(rows * 2 * F, 1.0f), dact(rows * F, 1.0f);
        for (int64_t i = 0; i < rows * F; i += 16) {
            gate_up[i / F * 2 * F + i % F] = 400;
            dact[i] = 0x1p-14f;
        }
        const Tensor in(gate_up, {rows, 2 * F}, E4M3_PER_1x16), gradient(dact, {rows, F}, PLAIN_BF16);
        const LazyTensor x = gpu::lazy_activation_backward(true, in.ref(), gradient.ref());
        const Tensor exact({rows, 2 * F}, PLAIN_FP32);
        gpu::write_values(x, exact.ref(), 0);
        const Floats values = exact.values();
        const float amax = reference::compute_amax(values.data(), rows * 2 * F);
        const float scale = reference::scale_of(E5M2_PER_TENSOR, amax);
        const Tensor out({rows, 2 * F}, E5M2_PER_TENSOR, scale);
        Operand operand = out.operand();
        operand.tensor.data = in.codes.get();
        gpu::quantize_operand(x, operand, nullptr, 0);
        CHECK(out.amax() == amax);
        const reference::StoredMatrix wanted =
            reference::quantize(values.data(), rows, 2 * F, E5M2_PER_TENSOR, {.scale = scale});
        CHECK(same_codes(E5M2_PER_TENSOR.element_format, in.codes.read(), wanted.elements));
    }
}

GPU_TEST_CASE("update_delayed_scales: delayed scales equal the reference's") {
    SEEDED_RANDOM(rng);
    constexpr int SCALES = 5;
    auto random_amax = [&] { return rng.below(9) ? float(std::exp(3 * rng.normal())) : INFINITY; };
    for (int length : {1, 3, 256, 257, 1024})
        for (Format format : {Format::E4M3, Format::E5M2}) {
            CAPTURE(length);
            std::vector<reference::DelayedScale> wanted(SCALES);
            std::vector<TensorScale> scales(SCALES);
            Buffer<float> histories(SCALES * length);
            auto wanted_histories = [&] {
                Floats all;
                for (const auto& w : wanted) all.insert(all.end(), w.history.begin(), w.history.end());
                return all;
            };
            for (int i = 0; i < SCALES; i++) {
                wanted[i].history.assign(length, 0.0f);
                if (i == 0) continue;  // has never had an amax
                for (float& amax : wanted[i].history) amax = rng.below(3) ? random_amax() : 0.0f;
                scales[i].delayed_scale = wanted[i].scale = float(rng.uniform());
            }
            histories.write(wanted_histories());
            Buffer<TensorScale> device_scales(SCALES);
            Buffer<uint32_t> empty(1);
            for (bool skipped : {false, true, false, false}) {
                for (int i = 1; i < SCALES; i++) scales[i].amax = wanted[i].amax = random_amax();
                device_scales.write(scales);
                const Buffer<gpu::GradientState> state({gpu::GradientState{1, 1, 1, skipped}});
                empty.zero();
                gpu::update_delayed_scales({.scales = device_scales.get(),
                                            .histories = histories.get(),
                                            .n = SCALES,
                                            .length = length,
                                            .fp8 = format},
                                           &state.get()->skip, empty.get(), 0);
                CHECK(empty.read()[0] == (skipped ? 0u : 1u));
                scales = device_scales.read();
                for (int i = 0; i < SCALES; i++) {
                    if (!skipped) wanted[i].update_history_and_scale(format);
                    CHECK(scales[i].delayed_scale == wanted[i].scale);
                }
                CHECK(histories.read() == wanted_histories());
            }
        }
}

// A dry run calls the same functions without a GPU, so that what is wrong is an error before a run starts.
TEST_CASE("quantize: not to groups; quantize_to_groups: to groups") {
    const TensorRef x{nullptr, 16, 32, PLAIN_BF16}, groups{nullptr, 16, 32, E4M3_PER_1x16};
    CHECK_THROWS_AS(gpu::quantize_operand(gpu::lazy_load(x), {groups}, nullptr, gpu::DRY_RUN), Error);
    CHECK_NOTHROW(gpu::quantize_to_groups(x, groups, /*write_back=*/false, nullptr, gpu::DRY_RUN));
}

TEST_CASE("quantize: only to FP8; write_values: not to FP8; write_operand: to both") {
    const TensorRef values{nullptr, 16, 32, PLAIN_BF16}, codes{nullptr, 16, 32, E4M3_PER_TENSOR};
    const LazyTensor x = gpu::lazy_load(values);
    CHECK_NOTHROW(gpu::quantize_operand(x, {codes}, nullptr, gpu::DRY_RUN));
    CHECK_THROWS_AS(gpu::quantize_operand(x, {values}, nullptr, gpu::DRY_RUN), Error);
    CHECK_NOTHROW(gpu::write_values(x, values, gpu::DRY_RUN));
    CHECK_THROWS_AS(gpu::write_values(x, codes, gpu::DRY_RUN), Error);
    CHECK_NOTHROW(gpu::write_operand(x, {codes}, nullptr, gpu::DRY_RUN));
    CHECK_NOTHROW(gpu::write_operand(x, {values}, nullptr, gpu::DRY_RUN));
}
