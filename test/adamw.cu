// adamw.cu - tests of AdamW on the GPU (../adamw.cu, gpu/other_optimizers.cu), and of the report's
// measurement of moments (gpu/quant_report.cu). A step is compared with the same step in double and in the
// CPU reference; help/adamw.h says how.
#include "../gpu/quant_report.h"
#include "help/adamw.h"

using namespace coat;
using namespace coat::test;

constexpr AdamWOptions STEP{.update_number = 3, .lr = 1e-2f};

GPU_TEST_CASE("adamw: weights and moments and amax of every optimizer") {
    SEEDED_RANDOM(rng);
    const struct {
        Format compute;
        bool has_master;
        Format gradients;          // FP32 gradients have values that BF16 would round
        const char* distribution;  // that they are drawn from; null: each in turn
    } rows[] = {
        {.compute = Format::BF16, .has_master = true, .gradients = Format::BF16, .distribution = nullptr},
        {.compute = Format::BF16, .has_master = true, .gradients = Format::FP32, .distribution = "normal"},
        {.compute = Format::BF16,
         .has_master = false,
         .gradients = Format::BF16,
         .distribution = "mostly zeros"},
        {.compute = Format::BF16, .has_master = false, .gradients = Format::FP32, .distribution = "normal"},
        {.compute = Format::FP32,
         .has_master = true,
         .gradients = Format::FP32,
         .distribution = "exp of normal"},
        {.compute = Format::FP32, .has_master = true, .gradients = Format::FP32, .distribution = "normal"}};
    for (const auto& row : rows)
        for (const OptimizerFormats& o : optimizers())
            for (const Distribution& d : distributions()) {
                if (row.distribution && d.name != row.distribution) continue;
                if (d.name == "huge" || d.name == "any magnitude") continue;  // their squares overflow
                CAPTURE(d.name);
                check_adamw(AdamWRun(rng, o, row.compute, row.has_master, row.gradients, d), STEP);
            }
}

GPU_TEST_CASE("adamw: a rank that has nothing of a bucket sets the amax of its weights to 0") {
    const Buffer<float> amax(std::vector<float>{OLD_AMAX});
    const Buffer<gpu::AdamWParam> param({gpu::AdamWParam{
        .memory_offset = 0, .size = 0, .m = {}, .v = {}, .decays = true, .weight_amax = amax.get()}});
    for (bool skip : {true, false}) {
        const Buffer<gpu::GradientState> state(std::vector<gpu::GradientState>{
            {.sum_of_squares = 1, .norm = 1, .clip_factor = 1, .skip = skip}});
        const gpu::ParamsToUpdate nothing{.table = param.get(),
                                          .count = 1,
                                          .elements = {.first = 0, .count = 0},
                                          .gradients = nullptr,
                                          .gradient_format = Format::BF16};
        gpu::adamw(STEP, optimizers()[0], nothing, {nullptr, nullptr, Format::BF16}, /*rounding_key=*/0,
                   state.get(), /*stream=*/nullptr);
        CHECK(amax.read()[0] == (skip ? OLD_AMAX : 0.0f));
    }
}

// measure_moment_errors() copies the old moments and the gradient from the GPU, and calls the reference with
// them. So this test checks what is copied; the reference has tests of its own. Of a large parameter 128 pieces
// of 2048 elements are measured, which are evenly spread.
GPU_TEST_CASE("measure_moment_errors: which pieces of the moments and of the gradient are measured") {
    SEEDED_RANDOM(rng);
    for (const char* name : {"coat", "fp8"}) {
        const OptimizerFormats& o = find_row(optimizers(), name, "--optimizer");
        for (int64_t n : {50000, 600077}) {
            CAPTURE(name);
            CAPTURE(n);
            const AdamWRun run(rng, o, Format::BF16, true, Format::BF16, distributions()[0], {n});
            const HostParam& p = run.params[0];
            const DeviceMoment m(p.m, p.padded()), v(p.v, p.padded());
            const Tensor g(run.gradient, Format::BF16);
            QuantReport report;
            gpu::measure_moment_errors(o, m.ref(), v.ref(), g.codes.get(), Format::BF16, n, report, 0);

            Floats x[2] = {load(p.m), load(p.v)};  // the moments after the step
            Floats weights(n);
            reference::adamw(reference::adamw_constants({1, 0.0f}, false, 1), n, run.gradient.data(),
                             weights.data(), x[0].data(), x[1].data());
            const bool in_part = n > 1 << 18;
            CHECK(report.moments_were_sampled == in_part);
            for (int i : {0, 1}) {
                Floats measured;
                const int64_t apart = n / 128 / MOMENT_GROUP_SIZE * MOMENT_GROUP_SIZE;
                for (int64_t j = 0; j < n; j++)
                    if (!in_part || (j / apart < 128 && j % apart < 2048)) measured.push_back(x[i][j]);
                Moment expected(o, i ? o.v_format : o.m_format, int64_t(measured.size()),
                                /*second_moment=*/i);
                QuantStats stats;
                expected.store(measured.data(), &stats);
                const QuantStats& got =
                    report.stats_by_kind[int(i ? MeasuredKind::Moment2 : MeasuredKind::Moment1)];
                CHECK(got.elements == (in_part ? 1 << 18 : n));
                CHECK(got.elements == stats.elements);
                CHECK(got.flushed == stats.flushed);
                CHECK(got.signal == stats.signal);
                CHECK(got.noise == stats.noise);
            }
        }
    }
}

TEST_CASE("adamw: moment groups of which only one moment is in FP8 are an error") {
    // A dry run calls the same functions without a GPU.
    auto update = [](Format m, Format v) {
        const OptimizerFormats optimizer{.name = "", .m_format = m, .v_format = v, .expansion = true};
        const gpu::Weights none{nullptr, nullptr, Format::BF16};
        const gpu::ParamsToUpdate nothing{.table = nullptr,
                                          .count = 0,
                                          .elements = {},
                                          .gradients = nullptr,
                                          .gradient_format = Format::BF16};
        gpu::adamw(STEP, optimizer, nothing, none, /*rounding_key=*/0, /*state=*/nullptr, gpu::DRY_RUN);
    };
    CHECK_NOTHROW(update(Format::E4M3, Format::E4M3));
    CHECK_NOTHROW(update(Format::BF16, Format::FP32));
    CHECK_THROWS_AS(update(Format::E4M3, Format::BF16), Error);
    CHECK_THROWS_AS(update(Format::E4M3, Format::BF16), Error);
    CHECK_THROWS_AS(update(Format::FP32, Format::E4M3), Error);
    CHECK_THROWS_AS(update(Format::BF16, Format::E4M3), Error);
}
