// judge.cpp - the table of hints, the comparison with reference.cpp, and the inputs of each exercise.
//
// Every value that is compared has words: first the name of the result that it belongs to, then what is
// special about the input ("tie", "zeros"), then the mistakes that would give the same value as the reader's.
// The hint is chosen by the words that all wrong values have in common.
#include "judge.h"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <utility>

using namespace coat;
using reference::Quantized;
using Floats = std::vector<float>;
using Codes = std::vector<uint8_t>;

namespace {

// The first row of an exercise whose words all wrong values have gives the hint. Words with @ are about all
// of them together. @one: codes that are one apart; @factor: the same quotient; @power: a power of two. Rows
// of number 0 are for every exercise.
struct Hint {
    int number;
    const char *words, *text;
};
// clang-format off
const Hint HINTS[] = {
    {1, "E4M3 top", "In E4M3 the largest exponent has values, up to 448. Only 0x7f and 0xff are NaN."},
    {1, "top", "Only the largest exponent is wrong: see what is said of values above f.max."},
    {1, "subnormal", "Only exponent 0 is wrong: there is no leading 1, and the power is 2^(1 - bias)."},
    {2, "NaN", "Only NaN is wrong: its code is 0x7f, with the sign in bit 7."},
    {2, "zero", "Only zero is wrong: its code is 0, with the sign in bit 7."},
    {2, "saturates", "Only values beyond the largest are wrong: they get the code of f.max."},
    {2, "carry", "Only values that round up to a power of two are wrong: add steps whole to the exponent."},
    {2, "tie", "Only ties are wrong: halfway between two codes, the even one is nearest."},
    {2, "subnormal", "Only subnormal values are wrong: e is 1 - bias, the field 0, not e + bias."},
    {3, "zeros", "Only a tensor of zeros is wrong: its scale is 1."},
    {3, "tiny", "Only tiny values are wrong: s is at least 2^-126, so that 1 / s is finite."},
    {3, "minus", "Only a tensor with negative values is wrong: amax is the largest |x|."},
    {3, "fmax", "The scale is 128 times too small: 57344 is the largest value of E5M2; that of E4M3 is 448."},
    {3, "scale inverse", "This is 1 / s: return s = amax / 448."},
    {3, "divided", "A few codes are one off: multiply by 1 / s, rounded to FP32; do not divide by s."},
    {4, "zeros", "Only a group of zeros is wrong: its scale is 1."},
    {4, "short", "Only rows that end with a shorter group are wrong: the next row begins a new group."},
    {4, "code", "The scales are right, the codes are not: divide by the scale after it is rounded to BF16."},
    {4, "exact", "These are scales in FP32: they are stored in BF16, given::to_bf16(amax / 448)."},
    {4, "near", "The scales are near: amax / 448 is rounded to the nearest BF16 value."},
    {5, "NaN", "Only NaN is wrong: a maximum drops it, because a comparison with NaN is false."},
    {5, "short", "Only the last, shorter group is wrong: stop at n, but do not leave it out."},
    {5, "minus", "Only a tensor with negative values is wrong: use |x|."},
    {5, "result", "The maxima are right, the result is not: it is the largest of them."},
    {6, "zero", "Only zero is wrong: expand(0) and contract(0) are 0."},
    {6, "equal", "Only equal magnitudes are wrong: log(max / min) is about 0, and k is 64."},
    {6, "extreme", "Only extreme magnitudes are wrong: a quotient or a power leaves the range of FP32."},
    {6, "negative", "Only negative values are wrong: expand and contract keep the sign."},
    {6, "limits", "Only k is wrong: it is at least 1/16 and at most 64; equal magnitudes give 64."},
    {6, "k near", "k is near: it is rounded to the nearest multiple of 1/256."},
    {6, "k", "Only k is wrong: log R / log(max / min), where R is 448 over the smallest value, 2^-9."},
    {7, "short", "Only a group with fewer than 128 parameters is wrong: what do the others add?"},
    {7, "allzero", "Only a group of zeros is wrong: max = 0, k = 1, and codes 0."},
    {7, "zeros", "Only groups with zeros are wrong: the smallest magnitude is of those above 0."},
    {7, "stored", "The weight uses the moments after quantization: use m and v before they are stored."},
    {7, "old", "The weight uses the old moments: use the new m and v."},
    {7, "uncorrected", "The bias correction is missing: m / bias1 and v / bias2."},
    {7, "inside", "eps is added to the root, not inside it."},
    {8, "size", "A result has another shape: y is (tokens, out), dx (tokens, in), dw (out, in)."},
    {8, "unquantized", "This is the product of the matrices as they are: quantize both operands first."},
    {8, "rows", "fprop and dgrad sum over columns: x and g have 1x128 blocks there, quantized as they are."},
    {8, "blocks", "w has blocks of 128x128: given::quantized(w, 128, 128)."},
    {8, "columns", "wgrad sums over tokens, the rows of x and g: transpose both before quantizing them."},
    {8, "onex", "wgrad sums over tokens: its x has blocks along the features instead."},
    {8, "oneg", "wgrad sums over tokens: its g has blocks along the features instead."},
    {8, "twice", "An operand of wgrad was quantized twice: transpose the tensor itself, not its FP8 values."},
    {9, "nomean", "The term with the mean is missing: r depends on every x of the token."},
    {9, "noweight", "The weight is missing: d = dy weight."},
    {9, "noscale", "x is the value of its code times the scale of its group."},
    {9, "last", "dweight is the sum over all tokens, not that of the last one."},
    {9, "dweight", "Only dweight is wrong: the sum over tokens of dy x r; it must start at 0."},
    {10, "swapped", "gate and up are exchanged in the result: a row has dgate, then dup."},
    {10, "order", "gate and up are exchanged in the input: a row has gate, then up."},
    {10, "sigmoid", "This is the derivative of sigmoid; that of silu is s (1 + a (1 - s))."},
    {10, "scales", "up is decoded with the scales of gate: its own follow those in the row of scales."},
    {11, "cut", "Only matrices with cut tiles are wrong: compare with rows and cols before each access."},
    {11, "transposed oblong", "Only oblong matrices are wrong: a row of the transpose has `rows` values."},
    {11, "transposed", "Only the transpose is wrong: a __syncthreads(), or blockIdx.x and y exchanged?"},
    {0, "negative", "Only negative values are wrong: bit 7 is the sign, of zero as well."},
    {0, "E5M2", "Only E5M2 is wrong: use f.mantissa and f.bias in place of 3 and 7."},
    {0, "@one", "Every wrong code is one off: round to the nearest, do not cut off."},
    {0, "@power", "All are off by the same power of two: look at the exponent's bias."},
    {0, "@factor", "All are off by the same factor: look at the scale, or at what a mean divides by."},
};
// clang-format on

template <class... Parts> std::string text(const Parts&... parts) {
    std::ostringstream out;
    out.precision(9);
    (out << ... << parts);
    return out.str();
}
std::string hex(int code) {
    char digits[8];
    std::snprintf(digits, sizeof digits, "0x%02x", code);
    return digits;
}
constexpr uint8_t UNWRITTEN = 0xFF;  // codes are filled with it beforehand, other results with NaN
using Mistakes = std::map<std::string, double>;  // word, and the value that the mistake gives

// What is compared of one exercise.
class Comparison {
public:
    explicit Comparison(int number) : number_(number) {}

    void value(std::string words, const std::string& input, double expected, double got, double tolerance = 0,
               const Mistakes& mistakes = {}, Format format = Format::F32) {
        for (const auto& [word, value] : mistakes)
            if (std::abs(value - got) <= tolerance) words += " " + word;
        const Value v{words, input, format, expected, got};
        const bool both_nan = std::isnan(expected) && std::isnan(got), both_zero = expected == 0 && got == 0;
        const bool right = both_zero ? std::signbit(expected) == std::signbit(got)
                                     : both_nan || got == expected || std::abs(got - expected) <= tolerance;
        count_++;
        if (v.decoded(got) != 0 && !std::isnan(v.decoded(got))) written_.insert(v.result());
        if (!right) wrong_.push_back(v);
    }
    void code(const std::string& words, const std::string& input, int expected, int got,
              const Mistakes& mistakes = {}, Format format = Format::E4M3) {
        value(words, input, expected, got, 0, mistakes, format);
    }
    // mistakes: what each would make of the tensor
    void tensor(const std::string& words, const Floats& expected, const Floats& got,
                const std::map<std::string, Floats>& mistakes) {
        if (got.size() != expected.size())
            return value("size", words + ": number of values", double(expected.size()), double(got.size()));
        const double tolerance = 1e-4 * reference::amax(expected.data(), int64_t(expected.size()));
        for (size_t i = 0; i < expected.size(); i++) {
            Mistakes of_element;
            for (const auto& [word, result] : mistakes) of_element[word] = result[i];
            value(words, text("element ", i, " of ", words), expected[i], got[i], tolerance, of_element);
        }
    }

    int finish() const {
        std::cout << "exercise " << number_ << ": ";
        const std::string failure = std::exchange(judge::failure, "");
        if (!failure.empty()) {
            std::cout << failure << "\n";
        } else if (wrong_.empty()) {
            std::cout << "passed, " << count_ << " values agree with the reference.\n";
        } else if (written_.empty()) {
            std::cout << "nothing is computed yet: write the body of the function.\n";
        } else {
            const Value& v = wrong_[0];
            std::cout << wrong_.size() << " of " << count_ << " values differ. The first:\n  input     "
                      << v.input << "\n  expected  " << v.shown(v.expected) << "\n  yours     "
                      << v.shown(v.got) << "\n  hint      " << hint() << "\n";
        }
        return !wrong_.empty() || !failure.empty();
    }

private:
    struct Value {
        std::string words, input;
        Format format;  // of codes; else F32
        double expected, got;

        std::string result() const { return words.substr(0, words.find(' ')); }
        double decoded(double x) const {
            return format == Format::F32 ? x : reference::decode(format, uint16_t(x));
        }
        std::string shown(double x) const {
            return format == Format::F32 ? text(x) : hex(int(x)) + " = " + text(decoded(x));
        }
        bool has(const std::string& word, const Value& first) const {
            const double ratio = decoded(got) / decoded(expected), power = std::log2(std::abs(ratio));
            const bool factor =
                std::abs(first.decoded(first.got) / first.decoded(first.expected) / ratio - 1) <= 1e-4;
            return word == "@one"      ? format != Format::F32 && std::abs(got - expected) == 1
                   : word == "@factor" ? factor
                   : word == "@power"  ? factor && std::abs(power - std::rint(power)) <= 1e-4
                                       : (" " + words + " ").find(" " + word + " ") != std::string::npos;
        }
    };

    static bool matches(const std::string& words, const std::vector<Value>& wrong) {
        if (wrong.size() == 1 && (words == "@factor" || words == "@power")) return false;
        std::istringstream in(words);
        for (std::string word; in >> word;)
            for (const Value& v : wrong)
                if (!v.has(word, wrong[0])) return false;
        return true;
    }
    // From what all wrong values have in common; else those of the first one's result; else the first one.
    std::string hint() const {
        const std::string result = wrong_[0].result();
        if (!written_.count(result) && result != "size") return "This is not computed yet: " + result + ".";
        std::vector<Value> of_result;
        for (const Value& v : wrong_)
            if (v.result() == result) of_result.push_back(v);
        for (const auto& wrong : {wrong_, of_result, {wrong_[0]}})
            for (const Hint& h : HINTS) {
                const bool own = h.number == 0 || h.number == (number_ == 12 ? 7 : number_);
                if (!own || !matches(h.words, wrong)) continue;
                const std::string all = h.text;
                if (wrong.size() == wrong_.size()) return all;
                const size_t colon = all.find(": ");
                return "Values of several kinds are wrong. Of this one: " +
                       (colon == std::string::npos ? all : all.substr(colon + 2));
            }
        if (wrong_.size() == of_result.size() && written_.size() > 1)
            return "Only " + result + " is wrong: compare with its formula above the function.";
        return "Compute this value by hand, or a smaller case of it, as the text above the function says.";
    }

    int number_;
    size_t count_ = 0;
    std::vector<Value> wrong_;
    std::set<std::string> written_;  // results that are not all zero
};

// Normal values; spread: of the logarithms of their magnitudes. Every exercise begins with Random random(1),
// so that the first difference stays the same while it is looked for.
using Random = std::mt19937;
Floats normal(Random& random, int n, float spread = 0, bool positive = false) {
    std::normal_distribution<float> distribution;
    Floats x(n);
    for (float& v : x) v = distribution(random) * std::exp(spread * distribution(random));
    for (float& v : x) v = positive ? std::abs(v) : v;
    return x;
}

const std::tuple<std::string, Format, Fp8> FP8_FORMATS[] = {{"E4M3", Format::E4M3, E4M3},
                                                            {"E5M2", Format::E5M2, E5M2}};
using Cases = std::vector<std::pair<std::string, Floats>>;  // words, and an input

Floats scales_of(const Quantized& q) {  // of 1x16 groups, row by row
    Floats scales;
    for (int64_t r = 0; r < q.rows; r++)
        for (int64_t c = 0; c < q.cols; c += 16) scales.push_back(q.scale(r, c));
    return scales;
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
        judge::failure = text("given::product of ", a.rows, " x ", a.cols, " and ", b.rows, " x ", b.cols,
                              ": the inner dimensions differ. Is one to be transposed?");
    if (!judge::failure.empty()) return {};
    Matrix c{a.rows, b.cols, Floats(size_t(a.rows) * b.cols)};
    reference::matmul<float>(a.rows, b.cols, a.cols, {a.values.data(), a.cols, 1},
                             {b.values.data(), b.cols, 1}, c.values.data());
    return c;
}

int judge::decode(const Function<float(const Fp8&, uint8_t)>& decode) {
    Comparison c(1);
    for (const auto& [name, format, f] : FP8_FORMATS)
        for (int code = 0; code < 256; code++) {
            const int exponent = (code & 0x7F) >> f.mantissa, top = 0x7F >> f.mantissa;
            const std::string kind = exponent == 0 ? " subnormal" : exponent == top ? " top" : "";
            c.value(name + (code & 0x80 ? " negative" : "") + kind, name + " code " + hex(code),
                    reference::decode(format, uint16_t(code)), decode(f, uint8_t(code)));
        }
    return c.finish();
}

int judge::encode(const Function<uint8_t(const Fp8&, float)>& encode) {
    Comparison c(2);
    for (const auto& [name, format, f] : FP8_FORMATS) {
        auto check = [&, &name = name, format = format, &f = f](const std::string& words, float x) {
            for (float y : {x, -x})
                c.code(name + words + (std::signbit(y) ? " negative" : ""), text(name, ", x = ", y, words),
                       reference::encode(format, y), encode(f, y), {}, format);
        };
        for (int code = 0; code < reference::encode(format, f.max); code++) {
            const float low = reference::decode(format, uint16_t(code)),
                        step = reference::decode(format, uint16_t(code + 1)) - low;
            const std::string kind = code < 1 << f.mantissa ? " subnormal" : "",
                              up = kind + ((code + 1) % (1 << f.mantissa) ? "" : " carry");
            check(code ? kind : " zero", low), check(kind, low + step / 4);
            check(up + " tie", low + step / 2), check(up, low + step * 3 / 4);
        }
        for (float x : {f.max * 1.02f, f.max * 1.1f, 1e6f, 1e30f, INFINITY}) check(" saturates", x);
        check(" NaN", NAN), check(" subnormal", 1e-30f), check(" subnormal", 1e-42f);
    }
    return c.finish();
}

int judge::quantize_tensor(const Function<float(int, const float*, uint8_t*)>& quantize) {
    Comparison c(3);
    Random random(1);
    Floats minus = normal(random, 200), ties = {3.7f};
    minus[7] = -50;
    for (uint8_t code = 8; code < 0x7E; code++)
        ties.push_back((given::decode(code) + given::decode(code + 1)) / 2 * (3.7f / 448));
    const Cases cases = {{"", normal(random, 2000, 1, true)},
                         {"", normal(random, 500, 9, true)},
                         {"", ties},
                         {" minus", minus},
                         {" zeros", Floats(40)},
                         {" tiny", {1e-39f, 3e-40f, 0, 1e-45f}}};
    for (const auto& [words, x] : cases) {
        const int n = int(x.size());
        const Quantized q = reference::quantize(x.data(), 1, n, {Format::E4M3});
        Codes codes(n, UNWRITTEN);
        const float s = q.scale(0, 0), got = quantize(n, x.data(), codes.data());
        const std::string of = text(" in a tensor with amax ", reference::amax(x.data(), n));
        c.value("scale" + words, "scale" + of, s, got, 1e-7 * s, {{"fmax", s / 128}, {"inverse", 1 / s}});
        for (int i = 0; i < n; i++)
            c.code("code" + words, text("code of x = ", x[i], of), q.codes[i], codes[i],
                   {{"divided", given::encode(x[i] / s)}});
    }
    return c.finish();
}

int judge::quantize_groups(const Function<void(int, int, const float*, uint8_t*, float*)>& quantize) {
    Comparison c(4);
    Random random(1);
    const int rows = 12;
    for (const auto& [cols, words] : std::map<int, std::string>{{64, ""}, {40, " short"}, {16, " zeros"}}) {
        Floats x = normal(random, rows * cols);
        for (int i = 0; i < rows * cols; i++) x[i] *= cols == 16 ? 0 : std::ldexp(1.0f, i / 16 % 9);
        const Quantized q = reference::quantize(x.data(), rows, cols, Q_GROUP);
        Codes codes(x.size(), UNWRITTEN);
        Floats scales(scales_of(q).size(), NAN);
        quantize(rows, cols, x.data(), codes.data(), scales.data());
        for (int r = 0, group = 0; r < rows; r++)
            for (int first = 0; first < cols; first += 16, group++) {
                const int begin = r * cols + first, n = std::min(16, cols - first);
                const float amax = reference::amax(x.data() + begin, n), s = q.scale(r, first);
                const float got = scales[group];
                const std::string of = text(" in row ", r, ", group ", first / 16, ", with amax ", amax);
                c.value("scale" + words + (std::abs(got / s - 1) < 0.01f ? " near" : ""), "scale" + of, s,
                        got, 0, {{"exact", amax / 448}});
                for (int i = begin; i < begin + n; i++)
                    c.code("code" + words, text("code of x = ", x[i], of), q.codes[i], codes[i]);
            }
    }
    return c.finish();
}

int judge::amax(const Function<float(int, const float*, float*)>& amax) {
    Comparison c(5);
    Random random(1);
    Floats minus = normal(random, 64), nan = normal(random, 80, 0, true), last = normal(random, 40, 0, true);
    for (int i = 5; i < 64; i += 16) minus[i] = float(-9 - i);
    nan[20] = NAN, nan[35] = 100, nan[79] = -NAN, last[39] = 77;
    const Cases cases = {{"", normal(random, 1024, 1, true)},
                         {"", Floats(16)},
                         {" minus", minus},
                         {" short minus", {1, -INFINITY}},
                         {" short", last},
                         {" short", {3.5f}},
                         {" NaN", nan}};
    for (const auto& [words, x] : cases) {
        const int n = int(x.size()), groups = (n + 15) / 16;
        Floats maxima(groups, NAN);
        const float got = amax(n, x.data(), maxima.data());
        const std::string of = text(" of ", n, " values", words);
        for (int g = 0; g < groups; g++)
            c.value("maximum" + words, text("maximum of group ", g, of),
                    reference::amax(x.data() + g * 16, std::min(16, n - g * 16)), maxima[g]);
        c.value("result" + words, "amax" + of, reference::amax(x.data(), n), got);
    }
    return c.finish();
}

int judge::expansion(const Function<float(float, float)>& expansion_factor, const Function<Expand>& expand,
                     const Function<Expand>& contract) {
    Comparison c(6);
    Random random(1);
    auto check = [&](const std::string& words, float max, float min) {
        const float k = given::expansion_factor(max, min), got = expansion_factor(max, min);
        const double exact = 256 * std::log2(448 * 512.0) / (std::log2(double(max)) - std::log2(double(min)));
        const bool border = std::abs(exact - std::floor(exact) - 0.5) < 0.01;  // both neighbours are right
        c.value("k" + words + (std::abs(got - k) <= 1.0f / 16 ? " near" : "") +
                    (got >= 1.0f / 16 && got <= 64 ? "" : " limits"),
                text("k of max = ", max, ", min = ", min), k, got, border ? 1.001 / 256 : 0);
        for (float part : {0.0f, 0.2f, 0.7f, 1.0f})
            for (float sign : {1.0f, -1.0f}) {
                const float x = sign * std::exp2((1 - part) * std::log2(min) + part * std::log2(max)),
                            y = given::expand(x, max, k), back = given::contract(y, max, k);
                const std::string of = text(", max = ", max, ", k = ", k), more = sign < 0 ? " negative" : "";
                c.value("expand" + words + more, text("expand of x = ", x, of), y, expand(x, max, k),
                        3e-3 * std::abs(y));
                c.value("contract" + words + more, text("contract of y = ", y, of), back, contract(y, max, k),
                        1e-4 * std::abs(back) + 3e-45);
            }
    };
    for (float magnitude : normal(random, 40))
        check("", std::exp(magnitude), std::exp(-1 - 3 * magnitude * magnitude));
    check(" equal", 3, 3), check(" equal", 1, 0.999f);
    check(" extreme", 1e30f, 1e-30f), check(" extreme", 1e38f, 1e-44f), check(" extreme", 1e-30f, 1e-38f);
    c.value("zero", "expand of x = 0, max = 2, k = 3", 0, expand(0, 2, 3));
    c.value("zero", "contract of y = 0, max = 2, k = 3", 0, contract(0, 2, 3));
    return c.finish();
}

int judge::adamw(const Function<AdamW>& adamw, int number) {
    Comparison c(number);
    Random random(1);
    const Step s{0.01f, 0.9f, 0.95f, 0.01f, 0.1f, 0.271f, 0.142625f};  // the third step
    const reference::AdamWFactors factors{s.lr,  s.beta1, s.beta2, 1 - s.beta1,        1 - s.beta2,
                                          s.eps, s.decay, s.bias1, std::sqrt(s.bias2), 1.0f};
    for (int round = 0; round < 24; round++) {
        const bool zeros = round % 4 == 2, all_zero = round == 4, small = round % 4 == 3;
        const int groups = number == 7 ? 1 : 1 + round % 5, n = 128 * groups - (small ? 91 : 0);
        const std::string words = small ? " short" : zeros ? " zeros" : all_zero ? " allzero" : "";
        const Floats before = normal(random, n);
        Floats g = normal(random, n, 1), w = before, my_w = before,
               old[2] = {normal(random, n, float(round % 3) / 2), normal(random, n)}, stored[2] = {w, w};
        reference::Moment moments[2], mine[2];
        for (int j : {0, 1}) {
            for (int i = 0; i < n; i++) {
                if (j == 1) old[j][i] *= old[j][i];
                if (all_zero || (zeros && i % 7 == 0)) g[i] = old[j][i] = 0;
            }
            moments[j].init(Format::E4M3, true, n), moments[j].store(old[j].data(), j == 1);
            moments[j].load(old[j].data());
            mine[j] = moments[j];
        }
        auto view = [](reference::Moment& m) { return Moment{m.codes.data(), m.max.data(), m.k.data()}; };
        adamw(s, n, g.data(), my_w.data(), view(mine[0]), view(mine[1]));
        const bool blank = my_w == before && mine[0].codes == moments[0].codes;
        Floats now[2] = {old[0], old[1]};
        reference::adamw(factors, n, g.data(), w.data(), now[0].data(), now[1].data());
        for (int j : {0, 1}) moments[j].store(now[j].data(), j == 1), mine[j].load(stored[j].data());

        // Of weights, the change is compared: it is small, and a mistake in it even smaller.
        auto change = [&](const Floats(&moment)[2], float bias1, float bias2, float inside, float eps) {
            Floats d(n);
            for (int i = 0; i < n; i++)
                d[i] = -s.lr * (moment[0][i] / bias1 / (std::sqrt(moment[1][i] / bias2 + inside) + eps) +
                                s.decay * before[i]);
            return d;
        };
        for (int i = 0; i < n; i++) w[i] -= before[i], my_w[i] -= before[i];
        c.tensor("w" + words, w, my_w,
                 {{"stored", change(stored, s.bias1, s.bias2, 0, s.eps)},
                  {"old", change(old, s.bias1, s.bias2, 0, s.eps)},
                  {"uncorrected", change(now, 1, 1, 0, s.eps)},
                  {"inside", change(now, s.bias1, s.bias2, s.eps, 0)}});
        for (int j = 0; j < 2 && !blank; j++) {
            const reference::Moment &expected = moments[j], &got = mine[j];
            for (int i = 0; i < n; i++) {
                const std::string of = text(" of ", "mv"[j], ", group ", i / 128, words);
                const float max = got.max[i / 128], k = got.k[i / 128], y = given::expand(now[j][i], max, k);
                if (i % 128 == 0) {
                    c.value("max" + words, "max" + of, expected.max[i / 128], max,
                            1e-5 * expected.max[i / 128]);
                    c.value("k" + words, "k" + of, expected.k[i / 128], k, 1.001 / 256);
                }
                // Logarithms differ in their last bits: at a border, both codes are right.
                const uint8_t mine = got.codes[i], code = expected.codes[i];
                const bool border = std::abs(given::decode(mine) - y) <=
                                    std::abs(given::decode(code) - y) + 0.01f * std::abs(y);
                c.code("code" + words, text("code ", i, of), border ? mine : code, mine);
            }
        }
    }
    return c.finish();
}

int judge::linear(const Function<Linear>& linear) {
    Comparison c(8);
    Random random(1);
    // Rows and columns of different magnitudes, so that it matters which values share a scale. The sizes are
    // no multiples of 128.
    auto matrix = [&](int rows, int cols) {
        Matrix x{rows, cols, normal(random, rows * cols)};
        const Floats by_row = normal(random, rows), by_col = normal(random, cols);
        for (int i = 0; i < rows * cols; i++) x.values[i] *= std::exp(by_row[i / cols] + by_col[i % cols]);
        return x;
    };
    const Matrix x = matrix(200, 160), w = matrix(144, 160), g = matrix(200, 144);
    Matrix y, dx, dw;
    linear(x, w, g, y, dx, dw);
    auto operand = [](const Matrix& m, Granularity blocks, reference::ReduceOver over) {
        return Matrix{m.rows, m.cols,
                      reference::operand(m.values, m.rows, m.cols, {Format::E4M3, blocks}, over)};
    };
    auto by_row = [=](const Matrix& m) { return operand(m, PER_1x128, reference::ReduceOver::Columns); };
    auto by_col = [=](const Matrix& m) { return operand(m, PER_1x128, reference::ReduceOver::Rows); };
    auto gemm = [](const Matrix& a, const Matrix& b) { return given::product(a, b).values; };
    const Matrix w8 = operand(w, PER_128x128, reference::ReduceOver::Columns);
    c.tensor("y", gemm(by_row(x), given::transposed(w8)), y.values,
             {{"unquantized", gemm(x, given::transposed(w))},
              {"rows", gemm(by_col(x), given::transposed(w8))},
              {"blocks", gemm(by_row(x), given::transposed(by_row(w)))}});
    c.tensor(
        "dx", gemm(by_row(g), w8), dx.values,
        {{"unquantized", gemm(g, w)}, {"rows", gemm(by_col(g), w8)}, {"blocks", gemm(by_row(g), by_row(w))}});
    c.tensor("dw", gemm(given::transposed(by_col(g)), by_col(x)), dw.values,
             {{"unquantized", gemm(given::transposed(g), x)},
              {"columns", gemm(given::transposed(by_row(g)), by_row(x))},
              {"oneg", gemm(given::transposed(by_row(g)), by_col(x))},
              {"onex", gemm(given::transposed(by_col(g)), by_row(x))},
              {"twice", gemm(given::transposed(by_col(by_row(g))), by_col(by_row(x)))}});
    return c.finish();
}

int judge::norm_backward(const Function<Norm>& backward) {
    Comparison c(9);
    Random random(1);
    const int N = 24, C = 96;
    Floats x = normal(random, N * C, 1), weight = normal(random, C, 0.3f), dy = normal(random, N * C);
    for (int i = 0; i < C; i++) x[3 * C + i] *= 1e-3f;  // a token in which eps counts
    const Quantized q = reference::quantize(x.data(), N, C, Q_GROUP);
    Floats dx(N * C, NAN), dweight(C, NAN), undecoded, sum, last, unused;
    backward(N, C, q.codes.data(), scales_of(q).data(), weight.data(), dy.data(), dx.data(), dweight.data());
    for (uint8_t code : q.codes) undecoded.push_back(given::decode(code));
    auto gradient = [&](const Floats& w, const Floats& x, Floats& dw, int first = 0) {
        Floats result(N * C);
        dw.assign(C, 0);
        reference::norm_backward<float>(true, 1e-5f, N - first, C, &x[first * C], w.data(), &dy[first * C],
                                        result.data(), dw.data(), nullptr);
        return result;
    };
    x = dequantize(q);
    Floats no_mean(N * C), ones(C, 1.0f), y(N * C);
    reference::norm_forward<float>(true, 1e-5f, N, C, x.data(), ones.data(), nullptr, y.data());
    for (int i = 0; i < N * C; i++) no_mean[i] = x[i] == 0 ? 0 : dy[i] * weight[i % C] * y[i] / x[i];
    c.tensor("dx", gradient(weight, x, sum), dx,
             {{"nomean", no_mean},
              {"noweight", gradient(ones, x, unused)},
              {"noscale", gradient(weight, undecoded, unused)}});
    gradient(weight, x, last, N - 1);
    c.tensor("dweight", sum, dweight, {{"last", last}});
    return c.finish();
}

int judge::swiglu_backward(const Function<SwiGLU>& backward) {
    Comparison c(10);
    Random random(1);
    const int N = 20, F = 48, row = 2 * F;
    Floats gate_up = normal(random, N * row, 0.7f), dact = normal(random, N * F), got(N * row, NAN);
    gate_up[0] = 60, gate_up[1] = -60;
    const Quantized q = reference::quantize(gate_up.data(), N, row, Q_GROUP);
    backward(N, F, q.codes.data(), scales_of(q).data(), dact.data(), got.data());
    auto gradient = [&](const Floats& x) {
        Floats result(N * row);
        reference::activation_backward<float>(true, N, F, x.data(), dact.data(), result.data());
        return result;
    };
    auto swapped = [&](const Floats& x) {
        Floats y(x.size());
        for (int i = 0; i < N * row; i++) y[i] = x[i % row < F ? i + F : i - F];
        return y;
    };
    const Floats x = dequantize(q), expected = gradient(x);
    Floats sigmoid = expected, gate_scales = x;
    for (int i = 0; i < N * row; i++)
        if (i % row < F) {
            const float s = 1 / (1 + std::exp(-x[i]));
            sigmoid[i] = dact[i / row * F + i % row] * x[i + F] * s * (1 - s);
            gate_scales[i + F] = given::decode(q.codes[i + F]) * q.scale(i / row, i % row);
        }
    c.tensor("dgate_up", expected, got,
             {{"swapped", swapped(expected)},
              {"order", swapped(gradient(swapped(x)))},
              {"order both", gradient(swapped(x))},
              {"sigmoid", sigmoid},
              {"scales", gradient(gate_scales)}});
    return c.finish();
}

int judge::quantize_transpose(const Function<Transpose>& quantize) {
    Comparison c(11);
    Random random(1);
    for (const auto& [rows, cols] : {std::pair{64, 64}, {32, 96}, {1, 1}, {100, 37}, {33, 160}}) {
        const Floats x = normal(random, rows * cols, 1);
        const float inverse = 448 / reference::amax(x.data(), rows * cols);
        Codes codes(x.size(), UNWRITTEN), transposed = codes;
        quantize(rows, cols, inverse, x.data(), codes.data(), transposed.data());
        const std::string words = text(rows % 32 || cols % 32 ? " cut" : "", rows != cols ? " oblong" : "");
        for (int i = 0; i < rows * cols; i++) {
            const int r = i / cols, col = i % cols, expected = given::encode(x[i] * inverse);
            const std::string at = text("code of row ", r, ", column ", col, " of ", rows, " x ", cols);
            c.code("codes" + words, at, expected, codes[i]);
            c.code("transposed" + words, "transposed " + at, expected, transposed[col * rows + r]);
        }
    }
    return c.finish();
}
