// test_norm.cu - residual_add, norm and norm_backward against double, and their quantized outputs against the
// CPU reference.
#include <cmath>

#include "../coat.cuh"
#include "../gpu/norm.cuh"
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

const Shape ROWS[] = {{1, 16},   {5, 48},   {33, 128}, {19, 768}, {7, 1040},
                      {6, 2064}, {9, 4096}, {3, 6656}, {2, 16384}};

// Checks the statistics of every row: {mean, 1 / std}, or {0, 1 / rms}. A thread adds at most 32 values, and
// then 5 + 16 partial sums follow, so sums are good to 53 u of the sum of magnitudes.
void check_stats(const std::vector<float2>& stats, const Doubles& x, bool rms) {
    const int64_t C = static_cast<int64_t>(x.size() / stats.size());
    for (size_t n = 0; n < stats.size(); n++) {
        const double* row = &x[n * C];
        double mean = 0, magnitude = 0, square = 0;
        for (int64_t c = 0; c < C && !rms; c++) mean += row[c] / C, magnitude += std::abs(row[c]) / C;
        for (int64_t c = 0; c < C; c++) square += (row[c] - mean) * (row[c] - mean) / C;
        const double inverse = 1 / std::sqrt(square + NormCase::EPS);
        REQUIRE(std::abs(stats[n].x - mean) <= 64 * U * magnitude);
        // The error of the mean, relative to magnitude, changes every difference: relative to std it is
        // magnitude / std as large.
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
                const Floats x = heavy(rng, formats.compute, n), branch = heavy(rng, formats.compute, n);
                Floats sum(n);
                for (int64_t i = 0; i < n; i++) sum[i] = x[i] + branch[i];
                const Quant compute{formats.compute};
                const Tensor device_x(x, s.rows, s.cols, compute),
                    device_branch(branch, s.rows, s.cols, compute);
                for (bool reads_saved : {true, false}) {
                    if (!reads_saved && !formats.nonlinear.fp8()) continue;
                    Tensor x_out(s.rows, s.cols, compute), y(s.rows, s.cols, Q_E4M3);
                    NormCase c(rng, formats, rms, s.rows, s.cols);
                    gpu::residual_add(device_x.view(), device_branch.view(), x_out.view(), c.norm(),
                                      reads_saved, y.amax_and_scale(), 0);
                    CHECK(same_bytes(x_out.values(), rounded(formats.compute, sum)));
                    const reference::Quantized expected =
                        reference::quantize(sum.data(), s.rows, s.cols, formats.nonlinear);
                    CHECK(same_bytes(c.in.codes.read(), expected.codes));
                    CHECK(same_bytes(c.in.scales.read(), expected.scales));
                    CHECK(c.in.intact());
                    CHECK(x_out.intact());
                    CHECK(c.stats.intact());

                    gpu::Norm read = c.norm();
                    if (!reads_saved) read.in = x_out.view();
                    const Doubles in = doubles(reads_saved ? c.in.values() : x_out.values());
                    const Doubles out = c.forward(in);
                    check_lazy(gpu::norm(read), formats.compute, out, c.bound(in, out));
                    Tensor values(s.rows, s.cols, Q_F32);
                    gpu::quantize(gpu::norm(read), values.operand(), nullptr, 0);
                    CHECK(y.amax() == reference::amax(values.values().data(), n));
                    check_stats(c.stats.read(), in, rms);
                }
            }
}

namespace {

// The results of norm_backward in double, and the errors that are allowed.
struct ExactBackward {
    Doubles dx, dw, db, dx_bound, dw_bound, db_bound;
};

// dy (N, C) is the gradient of the norm's output. g (N, C), the gradient that comes around the norm, is added
// to dx if it is not null. `before` (C) is what dw and db start from.
ExactBackward exact_backward(const NormCase& c, Format compute, const Doubles& x, const Floats& dy,
                             const Floats* g, const Floats& before) {
    const int64_t N = c.N, C = c.C;
    const Doubles w = doubles(c.weight.values()), d = doubles(dy);
    ExactBackward r{Doubles(N * C), doubles(before), doubles(before), Doubles(N * C), Doubles(C), Doubles(C)};
    reference::norm_backward<double>(c.rms, NormCase::EPS, N, C, x.data(), w.data(), d.data(), r.dx.data(),
                                     r.dw.data(), c.rms ? nullptr : r.db.data());
    // dx = (dy w - a - xhat b) / std, with a = mean(dy w) and b = mean(dy w xhat). Each of the three terms
    // has the error of the sums and of a few roundings; here all terms are positive. xhat includes the error
    // of the mean.
    for (int64_t n = 0; n < N; n++) {
        const double *row = &x[n * C], *drow = &d[n * C];
        double mean = 0, magnitude = 0, square = 0, a = 0, b = 0;
        for (int64_t i = 0; i < C; i++) {
            mean += c.rms ? 0 : row[i] / C;
            magnitude += c.rms ? 0 : std::abs(row[i]) / C;
        }
        for (int64_t i = 0; i < C; i++) square += (row[i] - mean) * (row[i] - mean) / C;
        const double inverse = 1 / std::sqrt(square + NormCase::EPS);
        auto xhat = [&](int64_t i) { return (std::abs(row[i] - mean) + 2 * magnitude) * inverse; };
        for (int64_t i = 0; i < C; i++) {
            a += std::abs(drow[i] * w[i]) / C;
            b += std::abs(drow[i] * w[i]) * xhat(i) / C;
        }
        for (int64_t i = 0; i < C; i++) {
            r.dx_bound[n * C + i] = 192 * U * inverse * (std::abs(drow[i] * w[i]) + a + xhat(i) * b);
            r.dw_bound[i] += std::abs(drow[i]) * xhat(i);
            r.db_bound[i] += std::abs(drow[i]);
        }
    }
    const double rounding = half_ulp(compute);  // of the results
    for (int64_t i = 0; i < N * C; i++) {
        r.dx[i] += g ? (*g)[i] : 0;
        r.dx_bound[i] += (rounding + 2 * U) * (std::abs(r.dx[i]) + r.dx_bound[i]);
    }
    // dw and db: a block sums its rows, and then blocks are summed.
    auto widen = [&](Doubles& bound, const Doubles& value) {
        for (int64_t i = 0; i < C; i++)
            bound[i] = (256 + N / 64) * U * bound[i] + (rounding + U) * (std::abs(value[i]) + U * bound[i]);
    };
    widen(r.dw_bound, r.dw);
    widen(r.db_bound, r.db);
    return r;
}

}  // namespace

GPU_TEST_CASE("norm_backward: gradients of input, weight and bias, amax, statistics") {
    FRESH_RANDOM(rng);
    const Shape shapes[] = {{1, 16},    {50, 48},   {700, 128}, {2500, 768},
                            {37, 1040}, {40, 4096}, {9, 6656},  {3, 16384}};
    for (RecipeFormats formats : RECIPE_FORMATS)
        for (bool rms : {true, false})
            for (Shape s : shapes) {
                if (too_long(s.rows * s.cols)) continue;
                CAPTURE(s.cols);
                CAPTURE(rms);
                const int64_t N = s.rows, C = s.cols;
                const Format compute = formats.compute;
                NormCase c(rng, formats, rms, N, C);
                const Tensor in(heavy(rng, compute, N * C), N, C, formats.nonlinear);
                const Floats dy = heavy(rng, compute, N * C), g = normals(rng, compute, N * C);
                const Floats before = normals(rng, compute, C);
                const Tensor device_dy(dy, N, C, Quant{compute}), device_g(g, N, C, Quant{compute});
                const Doubles x = doubles(in.values());
                gpu::Norm norm = c.norm();
                norm.in = in.view();
                Buffer<float> workspace(
                    static_cast<int64_t>(gpu::norm_backward_workspace(C) / sizeof(float)));
                Bytes first_run;
                for (bool add : {true, false, true}) {
                    Tensor out(N, C, Quant{compute}), g_amax(1, 16, Q_E5M2);
                    Tensor dweight(before, compute), dbias(before, compute);
                    gpu::norm_backward(norm, device_dy.view(), add ? device_g.view() : View{}, out.view(),
                                       g_amax.amax_and_scale(), dweight.view(), rms ? View{} : dbias.view(),
                                       workspace.get(), 0);
                    const Floats got = out.values();
                    CHECK(g_amax.amax() == reference::amax(got.data(), N * C));
                    check_stats(c.stats.read(), x, rms);
                    CHECK(out.intact());
                    CHECK(workspace.intact());
                    if (add && !first_run.empty()) CHECK(same_bytes(first_run, out.codes.read()));
                    if (add) first_run = out.codes.read();

                    const ExactBackward exact = exact_backward(c, compute, x, dy, add ? &g : nullptr, before);
                    check_close(got, exact.dx, exact.dx_bound);
                    check_close(dweight.values(), exact.dw, exact.dw_bound);
                    if (!rms) check_close(dbias.values(), exact.db, exact.db_bound);
                }
            }
}
