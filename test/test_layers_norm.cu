// test_layers_norm.cu - residual_add, norm and norm_backward against double, and their quantized
// outputs against the CPU reference.
#include <cmath>

#include "../coat.cuh"
#include "../gpu/layers.cuh"
#include "device_tensors.h"
#include "gpu.h"
#include "quantized_outputs.h"
#include "random.h"

using namespace coat;
using namespace coat::test;
using gpu::View;
using namespace coat::test::device_tensors;
using namespace coat::test::quantized_outputs;

namespace {

const Shape ROWS[] = {{1, 16}, {5, 48}, {33, 128}, {19, 768}, {7, 1040}, {6, 2064}, {9, 4096}, {3, 6656}, {2, 16384}};

// {mean, 1 / std} of every row ({0, 1 / rms}). A thread adds at most 32 values and then 5 + 16 more: sums are good to 53 u.
void check_stats(const std::vector<float2>& stats, const Doubles& x, bool rms) {
    const size_t C = x.size() / stats.size();
    for (size_t n = 0; n < stats.size(); n++) {
        const double* row = &x[n * C];
        double mean = 0, magnitude = 0, square = 0;
        for (size_t c = 0; c < C && !rms; c++) mean += row[c] / static_cast<double>(C), magnitude += std::abs(row[c]) / static_cast<double>(C);
        for (size_t c = 0; c < C; c++) square += (row[c] - mean) * (row[c] - mean) / static_cast<double>(C);
        const double inverse = 1 / std::sqrt(square + NormCase::EPS);
        REQUIRE(std::abs(stats[n].x - mean) <= 64 * U * magnitude);
        // An error of the mean changes every difference: relative to the deviation it counts magnitude / std times.
        REQUIRE(std::abs(stats[n].y - inverse) <= 64 * U * inverse * (1 + magnitude * inverse));
    }
}

}  // namespace

GPU_TEST_CASE("residual_add and norm: sum, norm input, statistics and the norm that follows") {
    FRESH_RANDOM(rng);
    for (RecipeFormats formats : RECIPE_FORMATS)
        for (bool rms : {true, false})
            for (Shape s : ROWS) {
                CAPTURE(s.cols);
                CAPTURE(rms);
                const int64_t n = s.rows * s.cols;
                const Floats x = heavy(rng, formats.compute, n), a = heavy(rng, formats.compute, n);
                Floats sum(n);
                for (int64_t i = 0; i < n; i++) sum[i] = x[i] + a[i];
                const Tensor dx(x, s.rows, s.cols, Quant{formats.compute}), da(a, s.rows, s.cols, Quant{formats.compute});
                Tensor x_out(s.rows, s.cols, Quant{formats.compute}), y(s.rows, s.cols, Q_E4M3);
                NormCase c(rng, formats, rms, s.rows, s.cols);
                gpu::residual_add(dx.view(), da.view(), x_out.view(), c.norm(), y.tensor_scale(), 0);
                CHECK(same_bytes(x_out.values(), rounded(formats.compute, sum)));
                const reference::Quantized expected = reference::quantize(sum.data(), s.rows, s.cols, formats.nonlinear);
                CHECK(same_bytes(c.in.codes.read(), expected.codes));
                CHECK(same_bytes(c.in.scales.read(), expected.scales));
                CHECK(c.in.intact());
                CHECK(x_out.intact());
                CHECK(c.stats.intact());

                const Doubles in = doubles(c.in.values()), out = c.forward(in);
                check_lazy(gpu::norm(c.norm()), formats.compute, out, c.bound(in, out));
                Tensor values(s.rows, s.cols, Q_F32);
                gpu::quantize(gpu::norm(c.norm()), values.operand(), nullptr, 0);
                CHECK(y.amax() == reference::amax(values.values().data(), n));
                check_stats(c.stats.read(), in, rms);
            }
}

GPU_TEST_CASE("norm_backward: gradients of input, weight and bias, amax, statistics") {
    FRESH_RANDOM(rng);
    for (RecipeFormats formats : RECIPE_FORMATS)
        for (bool rms : {true, false})
            for (Shape s : {Shape{1, 16}, {50, 48}, {700, 128}, {2500, 768}, {37, 1040}, {40, 4096}, {9, 6656}, {3, 16384}}) {
                if (too_long(s.rows * s.cols)) continue;
                CAPTURE(s.cols);
                CAPTURE(rms);
                const int64_t N = s.rows, C = s.cols;
                NormCase c(rng, formats, rms, N, C);
                const Tensor in(heavy(rng, formats.compute, N * C), N, C, formats.nonlinear);
                const Floats dy = heavy(rng, formats.compute, N * C), g = normals(rng, formats.compute, N * C), before = normals(rng, formats.compute, C);
                const Tensor ddy(dy, N, C, Quant{formats.compute}), dg(g, N, C, Quant{formats.compute});
                gpu::Norm norm = c.norm();
                norm.in = in.view();
                Buffer<float> workspace(static_cast<int64_t>(gpu::norm_backward_workspace(C) / sizeof(float)));
                Bytes first_run;
                for (bool add : {true, false, true}) {
                    Tensor out(N, C, Quant{formats.compute}), g_amax(1, 16, Q_E5M2), dweight(before, formats.compute), dbias(before, formats.compute);
                    gpu::norm_backward(norm, ddy.view(), add ? dg.view() : View{}, out.view(), g_amax.tensor_scale(), dweight.view(), rms ? View{} : dbias.view(),
                                       workspace.get(), 0);
                    const Floats got = out.values();
                    CHECK(g_amax.amax() == reference::amax(got.data(), N * C));
                    check_stats(c.stats.read(), doubles(in.values()), rms);
                    CHECK(out.intact());
                    CHECK(workspace.intact());
                    if (add && !first_run.empty()) CHECK(same_bytes(first_run, out.codes.read()));
                    if (add) first_run = out.codes.read();

                    const Doubles x = doubles(in.values()), w = doubles(c.weight.values()), d = doubles(dy);
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
                        bound[i] += (half_ulp(formats.compute) + 2 * U) * (std::abs(dx[i]) + bound[i]);
                    }
                    check_close(got, dx, bound);
                    for (int64_t i = 0; i < C; i++) {  // a block adds up its rows, then blocks are added
                        bound_w[i] = (256 + N / 64) * U * bound_w[i] + (half_ulp(formats.compute) + U) * (std::abs(dw[i]) + U * bound_w[i]);
                        bound_b[i] = (256 + N / 64) * U * bound_b[i] + (half_ulp(formats.compute) + U) * (std::abs(db[i]) + U * bound_b[i]);
                    }
                    check_close(dweight.values(), dw, bound_w);
                    if (!rms) check_close(dbias.values(), db, bound_b);
                }
            }
}
