// Every kernel of coat.cu against the CPU reference or, where sums and powers are taken in FP32, against double with a bound that is
// worked out for every element from the formats. u = 2^-24 is FP32's half unit in the last place.
//
// A fused kernel is checked in two steps: its FP32 values against double, and then its codes, byte for byte, against the
// reference's quantization of those very values. Outputs are poisoned first, and nobody may write behind them.
#include <cmath>
#include <functional>

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

Bytes transposed(const Bytes& x, int64_t rows, int64_t cols) {
    Bytes t(x.size());
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) t[c * rows + r] = x[r * cols + c];
    return t;
}

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
    for (Format rounding : {Format::F32, Format::BF16}) {
        const Floats before(cols, 0.5f);
        Tensor sums(before, Format::F32);
        Buffer<float> workspace(gpu::COLUMN_PARTIALS * cols);
        gpu::column_sums(x, rounding, sums.view(), workspace.get(), 0);
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

GPU_TEST_CASE("NaN and infinity reach the amax, and the scale stays 1") {
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
}

GPU_TEST_CASE("FP8 transpose") {
    FRESH_RANDOM(rng);
    for (Shape s : SHAPES) {
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
            const Tensor gradient(e, V, C, Quant{p.stream}), by_position(w, T, C, Quant{p.stream});
            gpu::embedding_backward(dg.view(), dorder.get(), chunks.get(), static_cast<int64_t>(order.chunks.size()), gradient.view(), workspace.get(), 0);
            gpu::positions_backward(dg.view(), T, by_position.view(), 0);
            auto check = [&](const Floats& got, const Floats& before, auto row) {
                Doubles total = doubles(before), bound(before.size());
                for (size_t i = 0; i < bound.size(); i++) bound[i] = std::abs(before[i]) * U;
                for (int64_t i = 0; i < N * C; i++) {
                    total[row(i / C) * C + i % C] += g[i];
                    bound[row(i / C) * C + i % C] += std::abs(g[i]) * 64 * U;  // 32 in a chunk, up to N / 32 chunks, the gradient
                }
                for (size_t i = 0; i < bound.size(); i++) bound[i] += half_ulp(p.stream) * (std::abs(total[i]) + bound[i]);
                check_close(got, total, bound);
            };
            check(gradient.values(), e, [&](int64_t n) { return tokens[n]; });
            check(by_position.values(), w, [&](int64_t n) { return n % T; });
            CHECK(gradient.intact());
            CHECK(workspace.intact());
        }
}

GPU_TEST_CASE("norm backward: input, gain and bias gradients, amax, statistics") {
    FRESH_RANDOM(rng);
    for (Pair p : PAIRS)
        for (bool rms : {true, false})
            for (Shape s : {Shape{1, 16}, {50, 48}, {700, 128}, {2500, 768}, {37, 1040}, {40, 4096}, {9, 6656}, {3, 16384}}) {
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
                CAPTURE(s.cols);
                CAPTURE(gated);
                const int64_t N = s.rows, F = s.cols, planes = gated ? 2 : 1;
                const Tensor up(heavy(rng, p.stream, N * F * planes), N, F * planes, p.nonlinear), dh(heavy(rng, p.stream, N * F), N, F, Quant{p.stream});
                const Doubles x = doubles(up.values()), d = doubles(dh.values());
                Doubles h(N * F), dup(N * F * planes), bound(N * F), dbound(N * F * planes);
                reference::activation_forward<double>(gated, N, F, x.data(), h.data());
                reference::activation_backward<double>(gated, N, F, x.data(), d.data(), dup.data());
                // exp's error grows with its argument z: 2 z u and a few units of its own and of the reciprocal. Beyond 2^126 the fast
                // reciprocal gives zero: the absolute term.
                for (int64_t i = 0; i < N * F; i++) {
                    const int64_t at = gated ? i / F * 2 * F + i % F : i;
                    const double a = x[at], slope = gated ? 1 : 1.5957691216 * (1 + 3 * 0.044715 * a * a), z = gated ? a : 1.5957691216 * (a + 0.044715 * a * a * a);
                    const double sig = 1 / (1 + std::exp(-z)), up_i = gated ? x[at + F] : 1, error = (8 * std::abs(z) + 64) * U, tiny = 0x1p-110 * (1 + std::abs(a * up_i));
                    bound[i] = std::abs(a * sig * up_i) * error + tiny;
                    const double bend = sig * (1 + std::abs(a) * slope * (1 - sig + 8 * U) * (1 + 8));
                    dbound[at] = std::abs(d[i] * up_i) * (bend * error + sig * std::abs(a) * slope * 16 * U) + std::abs(d[i]) * tiny * slope;
                    if (gated) dbound[at + F] = std::abs(d[i] * a * sig) * error + std::abs(d[i]) * tiny;
                }
                check_computed(gpu::activation(gated, up.view()), h, bound);
                check_computed(gpu::activation_backward(gated, up.view(), dh.view()), dup, dbound);
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
