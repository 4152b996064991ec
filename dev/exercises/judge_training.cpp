// judge_training.cpp - exercises 7 to 11 and 14, what a step of training computes: their inputs, what the
// reference makes of them, and what typical mistakes do.
#include <array>

#include "../../common/recipes.h"
#include "comparison.h"

using namespace judge;
using reference::StoredMatrix;

Fp8Matrix given::quantize(const Fp8& f, const Matrix& x) {
    const StoredMatrix q = reference::quantize(x.values.data(), x.rows, x.cols, {format_of(f)});
    return {x.rows, x.cols, f, q.scale(0, 0), q.elements};
}
float given::decode(const Fp8& f, uint8_t code) { return reference::decode(format_of(f), code); }
Fp8Matrix given::transposed(const Fp8Matrix& x) {
    Fp8Matrix y{x.cols, x.rows, x.format, x.scale, Codes(x.codes.size())};
    for (int r = 0; r < x.rows; r++)
        for (int c = 0; c < x.cols; c++) y.codes[c * x.rows + r] = x.codes[r * x.cols + c];
    return y;
}
static Matrix quantized_as(const Matrix& x, const TensorFormat& q) {
    return {x.rows, x.cols, dequantize(reference::quantize(x.values.data(), x.rows, x.cols, q))};
}
Matrix given::quantized(const Matrix& x) { return quantized_as(x, {Format::E4M3}); }
Matrix given::quantized_e5m2(const Matrix& x) { return quantized_as(x, {Format::E5M2}); }
Matrix given::quantized(const Matrix& x, int block_rows, int block_cols) {
    return quantized_as(x, {Format::E4M3, {block_rows, block_cols}});
}
Matrix given::transposed(const Matrix& x) {
    Matrix y{x.cols, x.rows, Floats(x.values.size())};
    for (int r = 0; r < x.rows; r++)
        for (int c = 0; c < x.cols; c++) y.values[c * x.rows + r] = x.values[r * x.cols + c];
    return y;
}
Matrix given::product(const Matrix& a, const Matrix& b) {
    if (a.cols != b.rows)
        judge::failure = text("given::product: a has ", a.cols, " columns and b ", b.rows,
                              " rows: it sums over both. Is one of them to be transposed?");
    if (!judge::failure.empty()) return {};
    Matrix c{a.rows, b.cols, Floats(size_t(a.rows) * b.cols)};
    reference::matmul(a.rows, b.cols, a.cols, reference::matrix_view(a.values, a.cols),
                      reference::matrix_view(b.values, b.cols), c.values.data());
    return c;
}

// --- 7 and 14 ---

namespace {

// What a step of AdamW has: the moments as they are loaded, the gradient and the weights before.
struct AdamWInputs {
    Step s;
    Floats m, v, g, w;
};
enum class AdamWSlip {
    None,
    NoCorrection,
    RootBeforeBias,
    EpsBeforeBias,
    BiasesExchanged,
    BetasExchanged,
    EpsInRoot,
    NotSquared,
    NoRoot,
    Coupled,
    NoDecay,
    DecayWithoutRate,
    UpdateWithoutRate,
    NoRate,
    DecayOfMoved,
    Uphill,
    WholeGradient,
    OldMoments
};

// The change of each weight: it is small, and a mistake in it even smaller.
Floats change_with(AdamWSlip slip, AdamWInputs in) {
    using enum AdamWSlip;
    Step s = in.s;
    if (slip == BiasesExchanged) std::swap(s.bias1, s.bias2);
    if (slip == BetasExchanged) std::swap(s.beta1, s.beta2);
    Floats change;
    for (size_t i = 0; i < in.g.size(); i++) {
        float g = in.g[i], m = in.m[i], v = in.v[i];
        if (slip == Coupled) g += s.decay * in.w[i];
        if (slip != OldMoments) {
            m = s.beta1 * m + (slip == WholeGradient ? g : (1 - s.beta1) * g);
            v = s.beta2 * v + (1 - s.beta2) * (slip == NotSquared ? g : g * g);
        }
        const float bias1 = slip == NoCorrection ? 1 : s.bias1, bias2 = slip == NoCorrection ? 1 : s.bias2;
        float divisor = std::sqrt(v / bias2) + s.eps;
        if (slip == RootBeforeBias) divisor = std::sqrt(v) / bias2 + s.eps;
        if (slip == EpsBeforeBias) divisor = (std::sqrt(v) + s.eps) / std::sqrt(bias2);
        if (slip == EpsInRoot) divisor = std::sqrt(v / bias2 + s.eps);
        if (slip == NoRoot) divisor = v / bias2 + s.eps;
        const bool no_rate = slip == UpdateWithoutRate || slip == NoRate;
        float update = (no_rate ? 1 : s.lr) * (m / bias1 / divisor);
        if (slip == DecayWithoutRate || slip == NoRate) update += s.decay * in.w[i];
        else if (slip == DecayOfMoved) update += s.lr * s.decay * (in.w[i] - update);
        else if (slip != NoDecay && slip != Coupled) update += s.lr * s.decay * in.w[i];
        change.push_back(slip == Uphill ? update : -update);
    }
    return change;
}

// Of moments that are loaded without contraction
Floats linear_values(const reference::Moment& m) {
    Floats x;
    for (size_t i = 0; i < m.elements.size(); i++)
        x.push_back(given::decode(m.elements[i]) / 448 * m.max_magnitudes[i / 128]);
    return x;
}

void compare_change(Comparison& c, const AdamWInputs& in, const Floats (&linear)[2],
                    const Floats (&stored)[2], const Floats& expected, const Floats& mine) {
    using enum AdamWSlip;
    const std::vector<std::pair<AdamWSlip, const char*>> slips = {
        {NoCorrection, "The bias correction is missing: m / bias1 and v / bias2."},
        {RootBeforeBias, "bias2 belongs inside the square root: sqrt(v / bias2)."},
        {EpsBeforeBias, "eps is added after the bias correction: sqrt(v / bias2) + eps."},
        {BiasesExchanged, "bias1 belongs to m, and bias2 to v."},
        {BetasExchanged, "beta1 belongs to m, and beta2 to v."},
        {EpsInRoot, "eps is added to the square root, not inside it."},
        {NotSquared, "v is a mean of g^2: g is not squared."},
        {NoRoot, "The update is divided by the square root of v."},
        {Coupled, "Weight decay is decoupled: it is added to the update, not to g."},
        {NoDecay, "The weight decay is missing."},
        {DecayWithoutRate, "The learning rate multiplies the weight decay, too."},
        {UpdateWithoutRate, "The learning rate is missing: it multiplies the update."},
        {NoRate, "The learning rate is missing: it multiplies the update and the weight decay."},
        {DecayOfMoved,
         "The weight decay is of the weight before the step, not of the weight after its update."},
        {Uphill, "The update is subtracted from the weight."},
        {WholeGradient, "m is a mean: g is multiplied by 1 - beta1."},
        {OldMoments, "Update the moments before the weight."}};
    std::vector<Hint> hints;
    for (const auto& [slip, text] : slips) hints.push_back({text, change_with(slip, in)});
    AdamWInputs without = in, quantized = in;
    for (int j : {0, 1}) {
        (j == 0 ? without.m : without.v) = linear[j];
        (j == 0 ? quantized.m : quantized.v) = stored[j];
    }
    hints.push_back(
        {"Loading a moment includes the expansion's inverse: given::contract.", change_with(None, without)});
    hints.push_back(
        {"Update the weight before the moments are quantized.", change_with(OldMoments, quantized)});
    c.input = [&in](size_t i) {
        const Step& s = in.s;
        return text("g = ", in.g[i], ", m = ", in.m[i], ", v = ", in.v[i], ", w = ", in.w[i],
                    " before the step;") +
               text(std::setprecision(6), "\n            lr = ", s.lr, ", beta1 = ", s.beta1,
                    ", beta2 = ", s.beta2, ", eps = ", s.eps, ", decay = ", s.decay, ", bias1 = ", s.bias1,
                    ", bias2 = ", s.bias2);
    };
    c("change of w", expected, mine, hints, 1e-4);
}

constexpr const char* OTHER_SCALING = "m and v each have a max and a k of their own.";

// The input of max and k
std::string magnitudes_of(const float* x, int n) {
    float largest = 0, smallest = INFINITY;
    int zeros = 0;
    for (int i = 0; i < n; i++) {
        largest = std::max(largest, std::abs(x[i]));
        if (x[i] != 0) smallest = std::min(smallest, std::abs(x[i]));
        else zeros++;
    }
    if (zeros == n) return text(n, " values after the update, which are all 0");
    return text(n, " values after the update, ", zeros, " of them 0; magnitudes of the others are from ",
                smallest, " to ", largest);
}

// now: the moment before it is stored; before, expected and mine: as it is stored
// other: the other moment
void compare_moment(Comparison& c, const std::string& of, bool zeros, const Floats& now,
                    const reference::Moment& before, const reference::Moment& expected,
                    const reference::Moment& mine, const reference::Moment& other) {
    Codes codes = expected.elements;
    Floats outdated, linear;
    for (size_t i = 0; i < now.size(); i++) {
        const size_t moment_group = i / 128;
        // Logarithms differ in their last bits: at a border, both codes are right.
        const float y =
            given::expand(now[i], mine.max_magnitudes[moment_group], mine.expansion_exponents[moment_group]);
        for (float near : {y * 0.995f, y * 1.005f})
            if (mine.elements[i] == given::encode(near)) codes[i] = mine.elements[i];
        outdated.push_back(given::encode(given::expand(now[i], before.max_magnitudes[moment_group],
                                                       before.expansion_exponents[moment_group])));
        linear.push_back(given::encode(now[i] / mine.max_magnitudes[moment_group] * 448));
    }
    for (size_t moment_group = 0; moment_group < expected.max_magnitudes.size(); moment_group++) {
        const int first = int(moment_group) * 128, n = std::min(128, int(now.size()) - first);
        const float k = expected.expansion_exponents[moment_group];
        c.input = [&now, first, n](size_t) { return magnitudes_of(&now[first], n); };
        c("max" + of, Floats{expected.max_magnitudes[moment_group]},
          Floats{mine.max_magnitudes[moment_group]},
          {{SIGNED, {largest_signed(&now[first], n)}},
           {"max is that before the step.", {before.max_magnitudes[moment_group]}},
           {OTHER_SCALING, {other.max_magnitudes[moment_group]}}},
          1e-5);
        c("k" + of, Floats{k}, Floats{mine.expansion_exponents[moment_group]},
          {{"k is 1 everywhere: compute it from max and the smallest magnitude.", {1}},
           {"k is that before the step.", {before.expansion_exponents[moment_group]}},
           {OTHER_SCALING, {other.expansion_exponents[moment_group]}},
           {"The smallest magnitude must not begin with 0: it would stay 0.",
            {expected.max_magnitudes[moment_group] ? 1 / 16.0f : 1}},
           where(std::isnan(mine.expansion_exponents[moment_group]),
                 "k is no number: the smallest magnitude may not be negative, so take |x|."),
           where(zeros,
                 "Zeros do not count in the smallest magnitude; a moment group of zeros has max = 0 and "
                 "k = 1.")},
          1.001 / 256 / k);
    }
    c.input = [&](size_t i) {
        return text(now[i], " after the update; your max = ", mine.max_magnitudes[i / 128],
                    ", k = ", mine.expansion_exponents[i / 128]);
    };
    c("code" + of + " (for your max and k)", codes, mine.elements,
      {{"The codes belong to the new max and k.", outdated},
       {"Storing a moment includes its expansion: given::expand.", linear}});
}

// Gives the moments that are loaded, and stores them; the gradient of a moment group with zeros has zeros
// there, too.
AdamWInputs adamw_inputs(Comparison& c, int n, int round, bool zeros, reference::Moment (&stored)[2]) {
    const Step step{0.01f, 0.9f, 0.95f, 0.01f, 0.1f, 0.271f, 0.142625f};  // the third step
    AdamWInputs in{step, {}, {}, {}, c.normal(n)};
    in.g = c.normal(n, 1);
    in.m = c.normal(n, float(round % 3) / 2);
    in.v = c.normal(n);
    for (int i = 0; i < n; i++) {
        in.v[i] *= in.v[i];
        if (zeros && (round == 2 || i % 7 == 0)) in.g[i] = in.m[i] = in.v[i] = 0;
    }
    for (int j : {0, 1}) {
        Floats& values = j == 0 ? in.m : in.v;
        stored[j] = reference::Moment(find_row(optimizers(), "coat", "--optimizer"), Format::E4M3, n,
                                      /*second_moment=*/j == 1);
        stored[j].store(values.data());
        stored[j].load(values.data());
    }
    return in;
}

}  // namespace

int judge::adamw(const Function<AdamW>& adamw, int number) {
    Comparison c(number);
    for (int round = 0; round < 24; round++) {
        const bool zeros = round % 4 == 2, small = round % 4 == 3;
        if (zeros) c.special = "moment groups with zeros";
        else c.special = small ? "moment groups with fewer than 128 parameters" : "";
        const int n = 128 * (number == 14 ? 1 + round % 5 : 1) - (small ? 91 : 0);
        reference::Moment before[2], mine[2];
        const AdamWInputs in = adamw_inputs(c, n, round, zeros, before);
        Floats my_w = in.w, stored[2] = {in.m, in.m};
        my_w.resize(n + GUARDS, UNDEFINED);
        auto view = [](reference::Moment& m) {
            return Moment{m.elements.data(), m.max_magnitudes.data(), m.expansion_exponents.data()};
        };
        for (int j : {0, 1}) {
            mine[j] = before[j];
            mine[j].elements.resize(n + GUARDS, UNWRITTEN);
        }
        adamw(in.s, n, guarded(in.g).data(), my_w.data(), view(mine[0]), view(mine[1]));
        const bool blank =
            std::equal(in.w.begin(), in.w.end(), my_w.begin()) &&
            std::equal(before[0].elements.begin(), before[0].elements.end(), mine[0].elements.begin());

        const reference::AdamWConstants factors{.lr = in.s.lr,
                                                .beta1 = in.s.beta1,
                                                .beta2 = in.s.beta2,
                                                .one_minus_beta1 = 1 - in.s.beta1,
                                                .one_minus_beta2 = 1 - in.s.beta2,
                                                .eps = in.s.eps,
                                                .decay = in.s.decay,
                                                .bias_correction1 = in.s.bias1,
                                                .bias_correction2_sqrt = std::sqrt(in.s.bias2),
                                                .clip_factor = 1.0f};
        Floats w = in.w, now[2] = {in.m, in.v};
        reference::adamw(factors, n, in.g.data(), w.data(), now[0].data(), now[1].data());
        reference::Moment expected[2] = {before[0], before[1]};
        for (int j : {0, 1}) {
            expected[j].store(now[j].data());
            mine[j].load(stored[j].data());
        }
        for (int i = 0; i < n; i++) {
            w[i] -= in.w[i];
            my_w[i] -= in.w[i];
        }
        compare_change(c, in, {linear_values(before[0]), linear_values(before[1])}, stored, w, my_w);
        for (int j : {0, 1})
            if (!blank)
                compare_moment(c, j == 0 ? " of m" : " of v", zeros, now[j], before[j], expected[j], mine[j],
                               expected[1 - j]);
    }
    const bool w_is_right = c.is_right("change of w");
    const bool k_is_right = c.is_right("k of m") && c.is_right("k of v");
    if (number == 17 && w_is_right != k_is_right) c.progress = "one of the two bugs is mended. ";
    const std::string unrounded =
        "The weight moves by the moments in FP32, before they are quantized again: only the next step sees "
        "the rounding.";
    const std::string zeros =
        " And zeros do not count in the smallest magnitude: with one of them the quotient max / min would be "
        "infinite and k 1/16, the least, so all codes of the moment group would lie close together.";
    return c.finish(number == 17 ? unrounded + zeros : unrounded);
}

// --- 8 and 9 ---

namespace {

using Quantizer = Matrix (*)(const Matrix&);
Matrix one_e4m3(const Matrix& m) { return given::quantized(m); }
Matrix one_e5m2(const Matrix& m) { return given::quantized_e5m2(m); }
Matrix itself(const Matrix& m) { return m; }
Matrix along_row(const Matrix& m) { return given::quantized(m, 1, 128); }
Matrix along_column(const Matrix& m) { return given::quantized(m, 128, 1); }
Matrix square(const Matrix& m) { return given::quantized(m, 128, 128); }
Matrix along_row_then_column(const Matrix& m) { return along_column(along_row(m)); }

struct LinearInputs {
    Matrix x, w, g;
};
// Of many magnitudes, so that it matters which values share a scale. The sizes are no multiples of 128.
LinearInputs linear_inputs(Comparison& c) {
    auto matrix = [&](int rows, int cols) { return Matrix{rows, cols, c.normal(rows * cols, 1)}; };
    return {matrix(200, 160), matrix(144, 160), matrix(200, 144)};
}
Matrix fprop(const LinearInputs& in, Quantizer x, Quantizer w) {
    return given::product(x(in.x), given::transposed(w(in.w)));
}
Matrix dgrad(const LinearInputs& in, Quantizer g, Quantizer w) { return given::product(g(in.g), w(in.w)); }
Matrix wgrad(const LinearInputs& in, Quantizer g, Quantizer x) {
    return given::product(given::transposed(g(in.g)), x(in.x));
}

// An operand of a GEMM, whose rows, or columns if it is transposed, lie along the sum.
struct Operand {
    const char* name;
    const Matrix& matrix;
    bool transposed;

    // Row or column i, of which the first three values are shown
    std::string shown(size_t i) const {
        const Matrix m = transposed ? given::transposed(matrix) : matrix;
        const float* const x = &m.values[i * m.cols];
        return text(std::setprecision(4), transposed ? "column " : "row ", i, " of ", name, " = ", x[0], ", ",
                    x[1], ", ", x[2], " ... (", m.cols, " values)");
    }
};

// Element (i, j) of the result is computed from row i of a, or column i, and row or column j of b.
void show_operands(Comparison& c, const Operand& a, const Operand& b) {
    const size_t cols = b.transposed ? b.matrix.cols : b.matrix.rows;
    c.input = [cols, a, b](size_t i) { return a.shown(i / cols) + ",\n            " + b.shown(i % cols); };
}

void compare_gemm(Comparison& c, const std::string& name, const Matrix& expected, Matrix mine,
                  std::vector<Hint> hints) {
    const bool same_shape = mine.rows == expected.rows && mine.cols == expected.cols;
    const bool turned = mine.rows == expected.cols && mine.cols == expected.rows;
    if (!mine.values.empty() && !same_shape && !turned && judge::failure.empty())
        judge::failure =
            text(name, " is to have ", expected.rows, " x ", expected.cols, " values, and yours has ",
                 mine.rows, " x ", mine.cols, ". Which operands must be transposed for it?");
    mine.values.resize(expected.values.size(), UNDEFINED);
    hints.push_back(
        {"This is the transpose: see the shapes above the function.", given::transposed(expected).values});
    c.place = row_and_column(expected.cols);
    c(name, expected.values, mine.values, hints, 1e-4);
}

}  // namespace

// Exercise 8's gemm alone: two matrices of 3 x 5 and 4 x 5, in two formats.
static void compare_small_gemm(Comparison& c, const judge::Function<judge::Gemm>& gemm) {
    auto random = [&](const Fp8& f, int rows) { return given::quantize(f, {rows, 5, c.normal(rows * 5)}); };
    const Fp8Matrix a = random(E5M2, 3), b = random(E4M3, 4);
    auto product = [&](float scale, const Fp8& format_of_a) {
        Floats values;
        for (int i = 0; i < a.rows; i++)
            for (int j = 0; j < b.rows; j++) {
                float sum = 0;
                for (int k = 0; k < 5; k++)
                    sum += given::decode(format_of_a, a.codes[i * 5 + k]) *
                           given::decode(b.format, b.codes[j * 5 + k]);
                values.push_back(sum * scale);
            }
        return values;
    };
    const Matrix expected{a.rows, b.rows, product(a.scale * b.scale, a.format)};
    auto row = [](const Fp8Matrix& m, size_t r) {
        std::string codes;
        for (int k = 0; k < 5; k++) codes += " " + hex(m.codes[r * 5 + k]);
        return codes + text(std::setprecision(4), " with the scale ", m.scale);
    };
    c.input = [&a, &b, row](size_t i) {
        return text("row ", i / 4, " of a in E5M2:", row(a, i / 4), ",\n            row ", i % 4,
                    " of b in E4M3:", row(b, i % 4));
    };
    compare_gemm(c, "gemm's result", expected, gemm(a, b),
                 {{"This is the sum of products of codes: multiply it by both scales.", product(1, a.format)},
                  {"This has only the scale of a.", product(a.scale, a.format)},
                  {"This has only the scale of b.", product(b.scale, a.format)},
                  {"Each matrix has a format of its own: given::decode(a.format, code).",
                   product(a.scale * b.scale, b.format)}});
}

int judge::linear(const Function<Gemm>& gemm, const Function<Linear>& linear) {
    Comparison c(8);
    compare_small_gemm(c, gemm);
    const LinearInputs in = linear_inputs(c);
    Matrix y, dx, dw;
    linear(in.x, in.w, in.g, y, dx, dw);
    const std::string g_format = "Gradients are quantized in E5M2: given::quantize(E5M2, g).";
    const std::string neither = "This is the product of unquantized matrices: quantize both.";
    const std::string blocks = "COAT has one scale for a tensor: given::quantize(E4M3, x).";
    const std::string result = "The result is not quantized: gemm gives it in FP32.";
    auto encoded = [](const Matrix& m) { return one_e4m3(m).values; };
    show_operands(c, {"x", in.x, false}, {"w", in.w, false});
    compare_gemm(c, "y", fprop(in, one_e4m3, one_e4m3), y,
                 {{"x is not quantized in fprop.", fprop(in, itself, one_e4m3).values},
                  {"w is not quantized in fprop.", fprop(in, one_e4m3, itself).values},
                  {"x is in E4M3; only gradients are in E5M2.", fprop(in, one_e5m2, one_e4m3).values},
                  {"w is in E4M3; only gradients are in E5M2.", fprop(in, one_e4m3, one_e5m2).values},
                  {"x and w are in E4M3; only gradients are in E5M2.", fprop(in, one_e5m2, one_e5m2).values},
                  {blocks, fprop(in, along_row, square).values},
                  {result, encoded(fprop(in, one_e4m3, one_e4m3))},
                  {neither, fprop(in, itself, itself).values}});
    show_operands(c, {"g", in.g, false}, {"w", in.w, true});
    compare_gemm(
        c, "dx", dgrad(in, one_e5m2, one_e4m3), dx,
        {{result, encoded(dgrad(in, one_e5m2, one_e4m3))},
         {"g is not quantized in dgrad.", dgrad(in, itself, one_e4m3).values},
         {"w is not quantized in dgrad: it has the codes of fprop.", dgrad(in, one_e5m2, itself).values},
         {g_format, dgrad(in, one_e4m3, one_e4m3).values},
         {neither, dgrad(in, itself, itself).values}});
    show_operands(c, {"g", in.g, true}, {"x", in.x, true});
    compare_gemm(c, "dw", wgrad(in, one_e5m2, one_e4m3), dw,
                 {{"x is quantized in fprop, but not in wgrad: both take the same codes.",
                   wgrad(in, one_e5m2, itself).values},
                  {"g is quantized in dgrad, but not in wgrad: both take the same codes.",
                   wgrad(in, itself, one_e4m3).values},
                  {g_format, wgrad(in, one_e4m3, one_e4m3).values},
                  {"x is in E4M3; only gradients are in E5M2.", wgrad(in, one_e5m2, one_e5m2).values},
                  {result, encoded(wgrad(in, one_e5m2, one_e4m3))},
                  {neither, wgrad(in, itself, itself).values}});
    return c.finish(
        "y sums over in, dx over out, dw over tokens. With one scale for the tensor its codes are the "
        "same before and after transposing, so x, w and g are quantized once each.");
}

int judge::linear_in_blocks(const Function<Linear>& linear) {
    Comparison c(9);
    const LinearInputs in = linear_inputs(c);
    Matrix y, dx, dw;
    linear(in.x, in.w, in.g, y, dx, dw);
    const std::string neither = "This is the product of unquantized matrices: quantize both.";
    const std::string w_blocks = "w has blocks of 128x128, not of 1x128.";
    const std::string per_tensor =
        "This has one scale for a tensor, as in exercise 8: here blocks of values share one.";
    const std::string result = "The result is not quantized: product gives it in FP32.";
    const std::string g_format = "g is in E4M3 here, in blocks: E5M2 with one scale is that of exercise 8.";
    show_operands(c, {"x", in.x, false}, {"w", in.w, false});
    compare_gemm(c, "y", fprop(in, along_row, square), y,
                 {{w_blocks, fprop(in, along_row, along_row).values},
                  {"x is not quantized in fprop.", fprop(in, itself, square).values},
                  {"w is not quantized in fprop.", fprop(in, along_row, itself).values},
                  {"fprop sums over features: blocks of x lie along them, not along tokens.",
                   fprop(in, along_column, square).values},
                  {"x has blocks of 1x128; only w has 128x128.", fprop(in, square, square).values},
                  {result, along_row(fprop(in, along_row, square)).values},
                  {per_tensor, fprop(in, one_e4m3, one_e4m3).values},
                  {neither, fprop(in, itself, itself).values}});
    show_operands(c, {"g", in.g, false}, {"w", in.w, true});
    compare_gemm(c, "dx", dgrad(in, along_row, square), dx,
                 {{w_blocks, dgrad(in, along_row, along_row).values},
                  {"w has blocks of 128x128, not of 1x128, transposed or not.",
                   dgrad(in, along_row, along_column).values},
                  {"g is not quantized in dgrad.", dgrad(in, itself, square).values},
                  {"w is not quantized in dgrad.", dgrad(in, along_row, itself).values},
                  {"g has blocks of 1x128; only w has 128x128.", dgrad(in, square, square).values},
                  {g_format, dgrad(in, one_e5m2, square).values},
                  {result, along_row(dgrad(in, along_row, square)).values},
                  {"dgrad sums over features: blocks of g lie along them, not along tokens.",
                   dgrad(in, along_column, square).values},
                  {neither, dgrad(in, itself, itself).values}});
    const std::string tokens =
        "wgrad sums over tokens, the rows of x and g: first transpose both, then quantize.";
    show_operands(c, {"g", in.g, true}, {"x", in.x, true});
    compare_gemm(c, "dw", wgrad(in, along_column, along_column), dw,
                 {{tokens, wgrad(in, along_row, along_row).values},
                  {"wgrad sums over tokens, but the blocks of x lie along features.",
                   wgrad(in, along_column, along_row).values},
                  {"wgrad sums over tokens, but the blocks of g lie along features.",
                   wgrad(in, along_row, along_column).values},
                  {"wgrad quantizes what is quantized already: begin with x and g as they are given.",
                   wgrad(in, along_row_then_column, along_row_then_column).values},
                  {g_format, wgrad(in, one_e5m2, along_column).values},
                  {result, along_row(wgrad(in, along_column, along_column)).values},
                  {"x is not quantized in wgrad.", wgrad(in, along_column, itself).values},
                  {"g is not quantized in wgrad.", wgrad(in, itself, along_column).values},
                  {neither, wgrad(in, itself, itself).values}});
    return c.finish(
        "The codes of w serve fprop and dgrad: its blocks are squares. x and g are quantized twice, "
        "along features for y and dx, along tokens for dw.");
}

// --- 10 ---

namespace {

enum class NormSlip {
    None,
    SumForMean,
    NoMeanTerm,
    Plus,
    SumInRoot,
    NoEps,
    NoWeight,
    SquareOfR,
    WeightInDweight,
    LastToken
};

// dx, and dweight, of N tokens with C values x
std::array<Floats, 2> norm_with(NormSlip slip, int N, int C, const Floats& x, const Floats& weight,
                                const Floats& dy) {
    Floats dx, dweight(C);
    for (int t = 0; t < N * C; t += C) {
        double squares = 0, products = 0;
        for (int i = 0; i < C; i++) {
            const double d = slip == NormSlip::NoWeight ? dy[t + i] : dy[t + i] * weight[i];
            squares += double(x[t + i]) * x[t + i];
            products += d * x[t + i];
        }
        if (slip != NormSlip::SumInRoot) squares /= C;
        const double r = 1 / std::sqrt(squares + (slip == NormSlip::NoEps ? 0 : 1e-5));
        double mean = products / C;
        if (slip == NormSlip::SumForMean) mean = products;
        if (slip == NormSlip::NoMeanTerm) mean = 0;
        if (slip == NormSlip::Plus) mean = -mean;
        const double cube = slip == NormSlip::SquareOfR ? r * r : r * r * r;
        for (int i = 0; i < C; i++) {
            const double d = slip == NormSlip::NoWeight ? dy[t + i] : dy[t + i] * weight[i];
            dx.push_back(float(r * d - cube * x[t + i] * mean));
            if (slip == NormSlip::LastToken) dweight[i] = 0;
            dweight[i] +=
                float(r * x[t + i] * dy[t + i] * (slip == NormSlip::WeightInDweight ? weight[i] : 1.0f));
        }
    }
    return {dx, dweight};
}

}  // namespace

int judge::norm_backward(const Function<Norm>& backward) {
    Comparison c(10);
    const int N = 24, C = 96;
    Floats x = c.normal(N * C, 1);
    const Floats weight = c.normal(C, 0.3f), dy = c.normal(N * C);
    for (int i = 0; i < C; i++) x[3 * C + i] *= 1e-3f;  // a token in which eps counts
    const StoredMatrix q = reference::quantize(x.data(), N, C, E4M3_PER_1x16);
    const Floats s = scales(x, N);
    Floats dx = undefined(N * C), dweight = undefined(C), expected(N * C), sum(C);
    backward(N, C, guarded(q.elements).data(), guarded(s).data(), guarded(weight).data(), guarded(dy).data(),
             dx.data(), dweight.data());
    x = dequantize(q);
    reference::norm_backward<float>(true, 1e-5f, N, C, x.data(), weight.data(), dy.data(), expected.data(),
                                    sum.data(), nullptr);

    const Floats no_scale = each(q.elements, [](uint8_t code) { return given::decode(code); });
    Floats wrong_row = no_scale;
    for (int i = 0; i < N * C; i++) wrong_row[i] *= s[i % C / 16];
    using enum NormSlip;
    const std::vector<std::pair<NormSlip, const char*>> slips = {
        {NoMeanTerm, "The term with the mean is missing: r depends on every x of the token."},
        {SumForMean, "The second term has a mean over the token's C values, not their sum."},
        {Plus, "The term with the mean is subtracted: r becomes less when |x| becomes more."},
        {SumInRoot, "r has the mean of x^2, not the sum."},
        {NoEps, "eps is missing: it counts in tokens of small values."},
        {NoWeight, "The gradient of the normalized value is dy * weight: weight is missing."},
        {SquareOfR, "The derivative of r has r^3, not r^2."},
        {WeightInDweight, "dweight is a sum of dy x r, without the weight."},
        {LastToken, "dweight is the sum over all tokens, not of the last."}};
    std::vector<Hint> of_dx, of_dweight;
    auto add = [&](const std::string& text, const std::array<Floats, 2>& results) {
        of_dx.push_back({text, results[0]});
        of_dweight.push_back({text, results[1]});
    };
    for (const auto& [slip, text] : slips) add(text, norm_with(slip, N, C, x, weight, dy));
    add("x is a code's value times its group's scale.", norm_with(None, N, C, no_scale, weight, dy));
    add("Each token has C / 16 scales of its own, after those of the token before.",
        norm_with(None, N, C, wrong_row, weight, dy));
    const auto place_in_vector = std::exchange(c.place, row_and_column(C));
    c.input = [&](size_t i) {
        return text("x", c.place(i), " = ", x[i], ", weight = ", weight[i % C], ", dy = ", dy[i]);
    };
    c("dx", expected, dx, of_dx, 1e-4);
    c.place = place_in_vector;
    c.input = [&](size_t i) { return text("x(0, ", i, ") = ", x[i], ", dy = ", dy[i], ", and so on"); };
    c("dweight", sum, dweight, of_dweight, 1e-4);
    return c.finish(
        "With d = dy weight, dx = r d - r^3 x mean(d x): the first part goes through the value's own y, "
        "the second through r.");
}

// --- 11 ---

namespace {

enum class SwigluSlip {
    None,
    Sigmoid,
    Silu,
    NoUp,
    NoSilu,
    Swapped,
    ShortRowsRead,
    ShortRowsWritten,
    ShortRows,
    Interleaved
};

Floats swiglu_with(SwigluSlip slip, int N, int F, const Floats& x, const Floats& dact) {
    using enum SwigluSlip;
    Floats result(2 * N * F, UNDEFINED);
    for (int i = 0; i < N * F; i++) {
        const int full = i / F * 2 * F + i % F, cut = i;
        int read = slip == ShortRowsRead || slip == ShortRows ? cut : full;
        int write = slip == ShortRowsWritten || slip == ShortRows ? cut : full;
        int distance = F;  // of up from gate
        if (slip == Interleaved) {
            read = write = 2 * i;
            distance = 1;
        }
        const double gate = x[read], up = x[read + distance], s = 1 / (1 + std::exp(-gate));
        double derivative = s * (1 + gate * (1 - s));
        if (slip == Sigmoid) derivative = s * (1 - s);
        if (slip == Silu) derivative = gate * s;
        float dgate = float(dact[i] * derivative * (slip == NoUp ? 1 : up));
        float dup = float(dact[i] * gate * (slip == NoSilu ? 1 : s));
        if (slip == Swapped) std::swap(dgate, dup);
        result[write] = dgate;
        result[write + distance] = dup;
    }
    return result;
}

}  // namespace

int judge::swiglu_backward(const Function<SwiGLU>& backward) {
    Comparison c(11);
    const int N = 20, F = 48, row = 2 * F;
    Floats gate_up = c.normal(N * row, 0.7f), got = undefined(N * row), expected(N * row);
    const Floats dact = c.normal(N * F);
    gate_up[(N - 1) * row] = 60;  // last: many mistakes look alike there
    gate_up[(N - 1) * row + 1] = -60;
    const StoredMatrix q = reference::quantize(gate_up.data(), N, row, E4M3_PER_1x16);
    const Floats s = scales(gate_up, N);
    backward(N, F, guarded(q.elements).data(), guarded(s).data(), guarded(dact).data(), got.data());
    const Floats x = dequantize(q),
                 no_scale = each(q.elements, [](uint8_t code) { return given::decode(code); });
    reference::activation_backward<float>(true, N, F, x.data(), dact.data(), expected.data());

    Floats gate_scales = no_scale, short_rows = no_scale, first_row = no_scale;
    for (int i = 0; i < N * row; i++) {
        const int group = i / 16, groups = row / 16, of_row = group % groups;
        gate_scales[i] *= s[of_row < F / 16 ? group : group - F / 16];
        short_rows[i] *= s[group / groups * (F / 16) + of_row];
        first_row[i] *= s[of_row];
    }
    using enum SwigluSlip;
    const std::vector<std::pair<SwigluSlip, const char*>> slips = {
        {Sigmoid, "This is the derivative of sigmoid; that of silu is s (1 + a (1 - s))."},
        {Silu, "This has silu itself in place of its derivative."},
        {NoUp, "dgate is multiplied by up, too."},
        {NoSilu, "dup has silu(gate), not gate."},
        {Swapped, "gate and up are exchanged in the result: a row has dgate, then dup."},
        {ShortRows,
         "A row has 2 F values, in the input and in the result: the next one begins 2 F further on."},
        {ShortRowsRead, "A row of codes has 2 F values: the next one begins 2 F further on."},
        {ShortRowsWritten, "A row of the result has 2 F values: the next one begins 2 F further on."},
        {Interleaved, "A row has F values of gate, then F of up: they do not alternate."}};
    std::vector<Hint> hints;
    for (const auto& [slip, text] : slips) hints.push_back({text, swiglu_with(slip, N, F, x, dact)});
    auto with = [&](const Floats& x) { return swiglu_with(None, N, F, x, dact); };
    hints.push_back({"A value is a code's value times its group's scale.", with(no_scale)});
    hints.push_back({"up has scales of its own, after those of gate.", with(gate_scales)});
    hints.push_back({"A row of scales has 2 F / 16, not F / 16.", with(short_rows)});
    hints.push_back({"Each row has scales of its own, after those of the row before.", with(first_row)});
    c.place = row_and_column(row);
    c.input = [&](size_t i) {
        const size_t token = i / row, feature = i % F, gate = token * row + feature;
        return text("token ", token, ", feature ", feature, ": gate = ", x[gate], ", up = ", x[gate + F],
                    ", dact = ", dact[token * F + feature]);
    };
    c("dgate_up", expected, got, hints, 1e-4);
    return c.finish(
        "silu = a s, and the derivative of s is s (1 - s). So that of silu is s + a s (1 - s) = s (1 + a (1 "
        "- "
        "s)): it is 1/2 at 0, and slightly negative far below.");
}
