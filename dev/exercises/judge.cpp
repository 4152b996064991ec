// judge.cpp - the inputs of each exercise, what the reference makes of them, and what typical mistakes do.
#include "judge.h"

#include <algorithm>
#include <array>
#include <iomanip>
#include <iostream>
#include <random>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

using namespace coat;
using reference::Quantized;
using Floats = std::vector<float>;
using Codes = std::vector<uint8_t>;

namespace {

template <class... Parts> std::string text(const Parts&... parts) {
    std::ostringstream out;
    out.precision(9);
    (out << ... << parts);
    return out.str();
}
std::string hex(int code) { return text("0x", std::hex, std::setw(2), std::setfill('0'), code); }

// A mistake, and what it makes of the inputs. It is named if every wrong value of a result is what it makes;
// without values, if it is given with every wrong value. No text: no mistake.
struct Hint {
    std::string text;
    Floats values = {};
};
// Of wrong values that have in common what is special about their input
Hint about(const std::string& special, bool here = true) {
    if (!here || special.empty()) return {""};
    return {"This is about " + special + ": read above the function what holds for them."};
}
constexpr uint8_t UNWRITTEN = 0xFF;  // codes are filled with it beforehand, other results with NaN

// Codes are equal, those of NaN and of zero with their signs, too. A value that is NaN has no sign.
bool agree(float expected, float got, double tolerance) {
    if (expected == 0 && got == 0) return std::signbit(expected) == std::signbit(got);
    return got == expected || std::abs(got - expected) <= tolerance ||
           (std::isnan(expected) && std::isnan(got));
}

// What is compared of one exercise.
class Comparison {
public:
    Format format = Format::E4M3;  // of codes, which are compared as uint8_t
    std::string special, of;       // about the input of what is compared; may be empty

    explicit Comparison(int number) : number_(number) {}

    // Normal values, the same in every run; spread: of the logarithms of their magnitudes
    Floats normal(int n, float spread = 0) {
        std::normal_distribution<float> distribution;
        Floats x(n);
        for (float& v : x) v = distribution(random_) * std::exp(spread * distribution(random_));
        return x;
    }

    // A result; tolerance: relative to the largest expected magnitude; from: the inputs of its values
    template <class T>
    void operator()(const std::string& result, const std::vector<T>& expected, const std::vector<T>& got,
                    std::vector<Hint> hints = {}, double tolerance = 0, const Floats& from = {}) {
        hints.insert(hints.begin(), about(special));
        double largest = 0;
        for (T v : expected) largest = std::max(largest, std::abs(double(v)));
        tolerance *= largest;
        for (size_t i = 0; i < expected.size(); i++) {
            const double y = value(expected[i]), mine = value(got[i]);
            count_++;
            if (mine != 0 && !std::isnan(mine)) written_.insert(result);
            if (agree(expected[i], got[i], tolerance)) continue;
            std::vector<std::string> found;
            for (const Hint& h : hints)
                if (h.values.empty() ? !h.text.empty() : agree(h.values[i], got[i], tolerance))
                    found.push_back(h.text);
            if (sizeof(T) == 1 && std::abs(got[i] - expected[i]) == 1)
                found.push_back("Every wrong code is one off: round to the nearest, not up or down.");
            if (mine * y != 0 && std::isfinite(mine / y))
                found.push_back(text("Every wrong value is off by the factor ", std::setprecision(3),
                                     mine / y, ": look at the scale, at a mean, or at the exponent's bias."));
            if (wrong_++ == 0) {
                result_ = result, common_ = found;
                shown_ = text("\n  input     ", result, expected.size() > 1 ? text(" ", i) : "",
                              from.empty() ? "" : text(" from ", from[i]), of, "\n  expected  ",
                              shown(expected[i]), "\n  yours     ", shown(got[i]));
                for (const Hint& h : hints)
                    if (h.values.empty() && about_.empty()) about_ = h.text;
            }
            auto alone = [&](auto& hint) { return std::count(found.begin(), found.end(), hint) == 0; };
            if (result == result_)
                common_.erase(std::remove_if(common_.begin(), common_.end(), alone), common_.end());
        }
    }

    int finish() const {
        const std::string failure = std::exchange(judge::failure, "");
        std::cout << "exercise " << number_ << ": ";
        if (!failure.empty()) std::cout << failure << "\n";
        else if (wrong_ == 0) std::cout << "passed, " << count_ << " values agree with the reference.\n";
        else if (written_.empty()) std::cout << "nothing is computed yet: write the body of the function.\n";
        else
            std::cout << wrong_ << " of " << count_ << " values differ. The first:" << shown_
                      << "\n  hint      " << hint() << "\n";
        return wrong_ > 0 || !failure.empty();
    }

private:
    double value(float x) const { return x; }
    double value(uint8_t code) const { return reference::decode(format, code); }
    std::string shown(float x) const { return text(x); }
    std::string shown(uint8_t code) const { return hex(code) + " = " + text(value(code)); }

    // What the wrong values of a result have in common, or else what is special about the first. A mistake
    // that makes only some of them may be chance: where a value is extreme, many mistakes look alike.
    std::string hint() const {
        if (!written_.count(result_)) return "This is not computed yet: " + result_ + ".";
        if (!common_.empty()) return common_[0];
        if (!about_.empty()) return "Not all wrong values are alike. Of this one: " + about_;
        return "Compare " + result_ + " and its operands with what stands above the function.";
    }

    int number_;
    std::mt19937 random_{1};
    size_t count_ = 0, wrong_ = 0;
    std::string result_, shown_, about_;  // of the first wrong value
    std::vector<std::string> common_;     // hints of all wrong values of that result
    std::set<std::string> written_;       // results that are not all zero
};

Format format_of(const Fp8& f) { return f.mantissa == 3 ? Format::E4M3 : Format::E5M2; }

template <class T, class F> Floats each(const std::vector<T>& x, F f) {
    Floats y;
    for (T v : x) y.push_back(f(v));
    return y;
}
Floats amaxes(const Floats& x, int rows) {  // of 1x16 groups, row by row
    Floats result;
    const int n = int(x.size()), cols = n / rows;
    for (int i = 0, width; i < n; i += width) {
        width = std::min(16, cols - i % cols);
        result.push_back(reference::amax(&x[i], width));
    }
    return result;
}
Floats scales(const Floats& x, int rows) {
    return each(amaxes(x, rows), [](float amax) { return reference::scale_of(E4M3_GROUP, amax); });
}

// Exercises 3 to 5: compare(c, rows, x) for the first of these tensors
template <class F> int on_tensors(int number, int count, F compare) {
    Comparison c(number);
    Floats negative = c.normal(64), nan = each(c.normal(80), fabsf), last = each(c.normal(120), fabsf);
    Floats ties = {3.7f};
    for (int i = 5; i < 64; i += 16) negative[i] = float(-9 - i);
    nan[20] = NAN, nan[35] = 100, nan[79] = -NAN, last[119] = 77;
    for (uint8_t code = 8; code < 0x77; code++)
        ties.push_back((given::decode(code) + given::decode(code + 1)) / 2 * (3.7f / 448));
    const std::vector<std::tuple<const char*, int, Floats>> tensors = {
        {"", 25, each(c.normal(2000, 1), fabsf)},
        {"", 31, each(c.normal(496, 9), fabsf)},
        {"", 7, ties},
        {"negative values", 4, negative},
        {"zeros", 3, Floats(48)},
        {"a last, shorter group", 3, last},
        {"tiny values", 1, Floats(16, 1e-39f)},
        {"NaN", 5, nan}};
    for (const auto& [special, rows, x] : tensors) {
        c.special = special;
        if (count-- > 0) compare(c, rows, x);
    }
    return c.finish();
}

}  // namespace

Matrix given::quantized(const Matrix& x, int block_rows, int block_cols) {
    const Quant q{Format::E4M3, {block_rows, block_cols}};
    return {x.rows, x.cols, dequantize(reference::quantize(x.values.data(), x.rows, x.cols, q))};
}
Matrix given::transposed(const Matrix& x) {
    Matrix y{x.cols, x.rows, Floats(x.values.size())};
    for (int r = 0; r < x.rows; r++)
        for (int c = 0; c < x.cols; c++) y.values[c * x.rows + r] = x.values[r * x.cols + c];
    return y;
}
Matrix given::product(const Matrix& a, const Matrix& b) {
    if (a.cols != b.rows)
        judge::failure = text("given::product: the inner dimensions ", a.cols, " and ", b.rows, " differ.");
    if (!judge::failure.empty()) return {};
    Matrix c{a.rows, b.cols, Floats(size_t(a.rows) * b.cols)};
    reference::matmul<float>(a.rows, b.cols, a.cols, {a.values.data(), a.cols, 1},
                             {b.values.data(), b.cols, 1}, c.values.data());
    return c;
}

int judge::decode(const Function<float(const Fp8&, uint8_t)>& decode) {
    Comparison c(1);
    for (const Fp8& f : {E4M3, E5M2})
        for (int code = 0; code < 256; code++) {
            const int field = (code & 0x7F) >> f.mantissa, top = 0x7F >> f.mantissa;
            c.of = " code " + hex(code);
            c(info(format_of(f)).name, Floats{reference::decode(format_of(f), uint8_t(code))},
              Floats{decode(f, uint8_t(code))},
              {about("codes whose sign bit is set", code & 0x80), about("codes with exponent 0", field == 0),
               about("the largest exponent", field == top)});
        }
    return c.finish();
}

int judge::encode(const Function<uint8_t(const Fp8&, float)>& encode) {
    Comparison c(2);
    for (const Fp8& f : {E4M3, E5M2}) {
        const Format format = c.format = format_of(f);
        Floats inputs;
        for (int code = 0; code < reference::encode(format, f.max); code++)
            for (float part : {0.0f, 0.25f, 0.5f, 0.75f})
                inputs.push_back((1 - part) * reference::decode(format, uint8_t(code)) +
                                 part * reference::decode(format, uint8_t(code + 1)));
        inputs.insert(inputs.end(), {f.max * 1.02f, f.max * 1.1f, 1e30f, INFINITY, NAN, 1e-42f});
        for (float magnitude : inputs)
            for (float x : {magnitude, -magnitude}) {
                const uint8_t code = uint8_t(reference::encode(format, x));
                const bool tie = reference::encode(format, x * 0.99f) != reference::encode(format, x * 1.01f);
                c(info(format).name, Codes{code}, Codes{encode(f, x)},
                  {about("zero", x == 0), about("ties", tie), about("NaN", std::isnan(x)),
                   about("negative values", std::signbit(x))},
                  0, {x});
            }
    }
    return c.finish();
}

int judge::quantize_tensor(const Function<float(int, const float*, uint8_t*)>& quantize) {
    return on_tensors(3, 7, [&](Comparison& c, int, const Floats& x) {
        const int n = int(x.size());
        const Quantized q = reference::quantize(x.data(), 1, n, {Format::E4M3});
        Codes codes(n, UNWRITTEN);
        const float s = q.scale(0, 0), got = quantize(n, x.data(), codes.data());
        c.of = text(" of a tensor with amax ", reference::amax(x.data(), n));
        c("scale", Floats{s}, Floats{got}, {}, 1e-7);
        c("code", q.codes, codes,
          {{"A few codes are one off: multiply by 1 / s, in FP32; do not divide by s.",
            each(x, [=](float v) { return float(given::encode(v / s)); })}},
          0, x);
    });
}

int judge::quantize_groups(const Function<void(int, int, const float*, uint8_t*, float*)>& quantize) {
    return on_tensors(4, 6, [&](Comparison& c, int rows, const Floats& x) {
        const int n = int(x.size()), cols = n / rows;
        const Floats amax = amaxes(x, rows);
        Codes codes(n, UNWRITTEN);
        Floats got(amax.size(), NAN);
        quantize(rows, cols, x.data(), codes.data(), got.data());
        c.of = text(" of ", rows, " x ", cols, " values");
        c("scale", scales(x, rows), got,
          {{"Scales are stored in BF16, not in FP32.", each(amax, [](float a) { return a / 448; })}}, 0,
          amax);
        c("code", reference::quantize(x.data(), rows, cols, E4M3_GROUP).codes, codes,
          {{"The scales are right: divide by the scale after it is rounded to BF16."}}, 0, x);
    });
}

int judge::amax(const Function<float(int, const float*, float*)>& amax) {
    return on_tensors(5, 8, [&](Comparison& c, int, const Floats& x) {
        const int n = int(x.size());
        Floats maxima((n + 15) / 16, NAN);
        const float got = amax(n, x.data(), maxima.data());
        c.of = text(" of ", n, " values");
        c("maximum", amaxes(x, 1), maxima);
        c("amax", Floats{reference::amax(x.data(), n)}, Floats{got});
    });
}

int judge::expansion(const Function<float(float, float)>& expansion_factor, const Function<Expand>& expand,
                     const Function<Expand>& contract) {
    Comparison c(6);
    auto check = [&](float max, float min) {
        const float k = given::expansion_factor(max, min), got = expansion_factor(max, min);
        const double exact = 256 * std::log2(448 * 512.0) / (std::log2(double(max)) - std::log2(double(min)));
        const bool border = std::abs(exact - std::floor(exact) - 0.5) < 0.01;  // both neighbours are right
        c.of = text(", max = ", max, ", min = ", min);
        c("k", Floats{k}, Floats{got},
          {{std::abs(got - k) > 1.0f / 16 ? "" : "k is near: round to the nearest multiple of 1/256."}},
          border ? 1.001 / 256 / k : 0);
        for (float part : {0.0f, 0.2f, 0.7f, 1.0f})
            for (float sign : {1.0f, -1.0f, 0.0f}) {
                const float x = sign * std::exp2((1 - part) * std::log2(min) + part * std::log2(max)),
                            y = given::expand(x, max, k), back = given::contract(y, max, k);
                const std::vector<Hint> hints = {about("negative values", x < 0), about("zero", x == 0)};
                c.of = text(", max = ", max, ", k = ", k);
                c("expand", Floats{y}, Floats{expand(x, max, k)}, hints, 3e-3, {x});
                c("contract", Floats{back}, Floats{contract(y, max, k)}, hints, 1e-4 + 3e-45 / std::abs(back),
                  {y});
            }
    };
    for (float magnitude : c.normal(40)) check(std::exp(magnitude), std::exp(-1 - 3 * magnitude * magnitude));
    c.special = "equal magnitudes";
    check(3, 3), check(1, 0.999f);
    c.special = "extreme magnitudes";
    check(1e30f, 1e-30f), check(1e38f, 1e-44f), check(1e-30f, 1e-38f);
    return c.finish();
}

int judge::adamw(const Function<AdamW>& adamw, int number) {
    Comparison c(number);
    const Step s{0.01f, 0.9f, 0.95f, 0.01f, 0.1f, 0.271f, 0.142625f};  // the third step
    const reference::AdamWFactors factors{s.lr,  s.beta1, s.beta2, 1 - s.beta1,        1 - s.beta2,
                                          s.eps, s.decay, s.bias1, std::sqrt(s.bias2), 1.0f};
    for (int round = 0; round < 24; round++) {
        const bool zeros = round % 4 == 2, all_zero = round == 2, small = round % 4 == 3;
        c.special = zeros ? "groups with zeros" : small ? "groups with fewer than 128 parameters" : "";
        const int n = 128 * (number == 7 ? 1 : 1 + round % 5) - (small ? 91 : 0);
        const Floats before = c.normal(n);
        Floats g = c.normal(n, 1), w = before, my_w = before, stored[2] = {w, w},
               now[2] = {c.normal(n, float(round % 3) / 2), c.normal(n)};
        for (int i = 0; i < n; i++) {
            now[1][i] *= now[1][i];
            if (zeros && (all_zero || i % 7 == 0)) g[i] = now[0][i] = now[1][i] = 0;
        }
        reference::Moment expected[2], mine[2];
        for (int j : {0, 1}) {
            expected[j].init(Format::E4M3, true, n), expected[j].store(now[j].data(), j == 1);
            expected[j].load(now[j].data());
            mine[j] = expected[j];
        }
        auto view = [](reference::Moment& m) { return Moment{m.codes.data(), m.max.data(), m.k.data()}; };
        adamw(s, n, g.data(), my_w.data(), view(mine[0]), view(mine[1]));
        const bool blank = my_w == before && mine[0].codes == expected[0].codes;
        reference::adamw(factors, n, g.data(), w.data(), now[0].data(), now[1].data());
        for (int j : {0, 1}) expected[j].store(now[j].data(), j == 1), mine[j].load(stored[j].data());

        // Of weights, the change is compared: it is small, and a mistake in it even smaller.
        auto change = [&](const Floats(&moment)[2], float bias1, float bias2) {
            Floats d(n);
            for (int i = 0; i < n; i++)
                d[i] = -s.lr * (moment[0][i] / bias1 / (std::sqrt(moment[1][i] / bias2) + s.eps) +
                                s.decay * before[i]);
            return d;
        };
        for (int i = 0; i < n; i++) w[i] -= before[i], my_w[i] -= before[i];
        c("change of w", w, my_w,
          {{"Update the weight before the moments are quantized.", change(stored, s.bias1, s.bias2)},
           {"The bias correction is missing: m / bias1 and v / bias2.", change(now, 1, 1)}},
          1e-4);
        for (int j = 0; j < 2 && !blank; j++) {
            const reference::Moment &m = expected[j], &my = mine[j];
            Codes codes = m.codes;
            // Logarithms differ in their last bits: at a border, both codes are right.
            for (int i = 0; i < n; i++) {
                const float y = given::expand(now[j][i], my.max[i / 128], my.k[i / 128]);
                for (float near : {y * 0.995f, y * 1.005f})
                    if (my.codes[i] == given::encode(near)) codes[i] = my.codes[i];
            }
            const std::string of = j == 0 ? " of m" : " of v";
            for (size_t i = 0; i < m.max.size(); i++) {
                c("max" + of, Floats{m.max[i]}, Floats{my.max[i]}, {}, 1e-5);
                c("k" + of, Floats{m.k[i]}, Floats{my.k[i]}, {}, 1.001 / 256 / m.k[i]);
            }
            c("code" + of, codes, my.codes);
        }
    }
    return c.finish();
}

int judge::linear(const Function<Linear>& linear) {
    Comparison c(8);
    // Of many magnitudes, so that it matters which values share a scale. The sizes are no multiples of 128.
    auto matrix = [&](int rows, int cols) { return Matrix{rows, cols, c.normal(rows * cols, 1)}; };
    const Matrix x = matrix(200, 160), w = matrix(144, 160), g = matrix(200, 144);
    Matrix mine[3];
    linear(x, w, g, mine[0], mine[1], mine[2]);

    // y, dx and dw, with blocks of x and g in fprop and dgrad, of w, and of x and g in wgrad
    using Block = std::array<int, 2>;
    auto gemms = [&](Block operand, Block weight, Block in_wgrad) {
        auto quantized = [](const Matrix& m, Block b) { return given::quantized(m, b[0], b[1]); };
        const Matrix w8 = quantized(w, weight), x_dw = quantized(x, in_wgrad), g_dw = quantized(g, in_wgrad);
        return std::array{given::product(quantized(x, operand), given::transposed(w8)),
                          given::product(quantized(g, operand), w8),
                          given::product(given::transposed(g_dw), x_dw)};
    };
    const Block row{1, 128}, col{128, 1}, square{128, 128}, one{1, 1};  // one: as good as unquantized
    const auto expected = gemms(row, square, col), rows = gemms(row, square, row),
               unquantized = gemms(one, one, one);
    for (int i : {0, 1, 2}) {
        mine[i].values.resize(expected[i].values.size(), NAN);
        c(std::vector{"y", "dx", "dw"}[i], expected[i].values, mine[i].values,
          {{"This is the product of unquantized matrices: quantize both.", unquantized[i].values},
           {"wgrad sums over tokens, the rows of x and g: first transpose both.", rows[i].values}},
          1e-4);
    }
    return c.finish();
}

int judge::norm_backward(const Function<Norm>& backward) {
    Comparison c(9);
    const int N = 24, C = 96;
    Floats x = c.normal(N * C, 1), weight = c.normal(C, 0.3f), dy = c.normal(N * C);
    for (int i = 0; i < C; i++) x[3 * C + i] *= 1e-3f;  // a token in which eps counts
    const Quantized q = reference::quantize(x.data(), N, C, E4M3_GROUP);
    Floats dx(N * C, NAN), dweight(C, NAN), y(N * C), sum(C), last(C), no_mean(N * C);
    backward(N, C, q.codes.data(), scales(x, N).data(), weight.data(), dy.data(), dx.data(), dweight.data());
    x = dequantize(q);
    auto gradient = [&](const Floats& x, Floats& dweight) {
        Floats result(N * C);
        reference::norm_backward<float>(true, 1e-5f, N, C, x.data(), weight.data(), dy.data(), result.data(),
                                        dweight.data(), nullptr);
        return result;
    };
    const Floats expected = gradient(x, sum), no_scale = gradient(each(q.codes, given::decode), last);
    reference::norm_forward<float>(true, 1e-5f, N, C, x.data(), weight.data(), nullptr, y.data());
    for (int i = 0; i < N * C; i++) {
        no_mean[i] = x[i] == 0 ? 0 : dy[i] * y[i] / x[i];
        last[i % C] = dy[i] * y[i] / weight[i % C];
    }
    c("dx", expected, dx,
      {{"The term with the mean is missing: r depends on every x of the token.", no_mean},
       {"x is a code's value times its group's scale.", no_scale}},
      1e-4);
    c("dweight", sum, dweight, {{"dweight is the sum over all tokens, not of the last.", last}}, 1e-4);
    return c.finish();
}

int judge::swiglu_backward(const Function<SwiGLU>& backward) {
    Comparison c(10);
    const int N = 20, F = 48, row = 2 * F;
    Floats gate_up = c.normal(N * row, 0.7f), dact = c.normal(N * F), got(N * row, NAN);
    gate_up[(N - 1) * row] = 60, gate_up[(N - 1) * row + 1] = -60;  // last: many mistakes look alike there
    const Quantized q = reference::quantize(gate_up.data(), N, row, E4M3_GROUP);
    backward(N, F, q.codes.data(), scales(gate_up, N).data(), dact.data(), got.data());
    auto gradient = [&](const Floats& x) {
        Floats result(N * row);
        reference::activation_backward<float>(true, N, F, x.data(), dact.data(), result.data());
        return result;
    };
    const Floats x = dequantize(q), expected = gradient(x);
    Floats sigmoid = expected, swapped = expected, gate_scales = x;
    for (int i = 0; i < N * row; i++)
        if (i % row < F) {
            const float s = 1 / (1 + std::exp(-x[i]));
            sigmoid[i] = dact[i / row * F + i % row] * x[i + F] * s * (1 - s);
            gate_scales[i + F] = given::decode(q.codes[i + F]) * q.scale(i / row, i % row);
            std::swap(swapped[i], swapped[i + F]);
        }
    c("dgate_up", expected, got,
      {{"gate and up are exchanged in the result: a row has dgate, then dup.", swapped},
       {"This is the derivative of sigmoid; that of silu is s (1 + a (1 - s)).", sigmoid},
       {"up has scales of its own, behind those of gate.", gradient(gate_scales)}},
      1e-4);
    return c.finish();
}

int judge::quantize_transpose(const Function<Transpose>& quantize) {
    Comparison c(11);
    for (const auto& [rows, cols] : {std::pair{64, 64}, {32, 96}, {1, 1}, {100, 37}, {33, 160}}) {
        const Floats x = c.normal(rows * cols, 1);
        const float inverse = 448 / reference::amax(x.data(), rows * cols);
        auto codes_of = [=](const Floats& values) {
            Codes codes;
            for (float v : values) codes.push_back(given::encode(v * inverse));
            return codes;
        };
        Codes codes(x.size(), UNWRITTEN), transposed = codes;
        quantize(rows, cols, inverse, x.data(), codes.data(), transposed.data());
        const Hint cut = about("matrices with cut tiles", rows % 32 || cols % 32),
                   oblong = about("oblong matrices", rows != cols);
        c.of = text(" of ", rows, " x ", cols);
        c("code", codes_of(x), codes, {cut});
        c("transposed code", codes_of(given::transposed({rows, cols, x}).values), transposed,
          {cut, oblong, {"The transpose is wrong: a __syncthreads(), or blockIdx.x and y exchanged?"}});
    }
    return c.finish();
}
