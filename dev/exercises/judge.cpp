// judge.cpp - the hints, the comparison with reference.cpp, and the inputs of each exercise.
//
// Every compared value has words that say what is special about it: "E4M3 tie", "scale zeros". Where a whole
// tensor is what a known mistake would make of it, the name of the mistake is a word, too. A hint is chosen
// by the words that all wrong values have in common.
#include "judge.h"

#include <cstdio>
#include <random>
#include <set>
#include <sstream>

#include "../../reference.h"

using namespace coat;
using reference::Quantized;
using reference::ReduceOver;
using Floats = std::vector<float>;
using Codes = std::vector<uint8_t>;

namespace {

// The first row of an exercise whose words all wrong values have gives the hint. Words with @ are about all
// of them together. @one: codes that are one apart; @factor: the same quotient; @power: a power of two; @few:
// less than a tenth is wrong. Rows of number 0 are for every exercise.
struct Hint {
    int number;
    const char *words, *text;
};
// clang-format off
const Hint HINTS[] = {
    {1, "negative", "Only negative values are wrong: bit 7 is the sign, of zero as well."},
    {1, "E4M3 top", "In E4M3 the largest exponent has values, up to 448. Only 0x7f and 0xff are NaN."},
    {1, "top", "Only the largest exponent is wrong: see what is said of values above f.max."},
    {1, "subnormal", "Only exponent 0 is wrong: there is no leading 1, and the power is 2^(1 - bias)."},
    {1, "@power", "All are off by the same power of two: look at the exponent's bias."},
    {1, "E5M2", "Only E5M2 is wrong: use f.mantissa and f.bias in place of 3 and 7."},
    {2, "NaN", "Only NaN is wrong: its code is 0x7f, with the sign in bit 7."},
    {2, "zero", "Only zero is wrong: its code is 0, with the sign in bit 7."},
    {2, "saturates", "Only values beyond the largest are wrong: they get the code of f.max."},
    {2, "carry", "Only values that round up to a power of two are wrong: add steps whole to the exponent."},
    {2, "tie", "Only ties are wrong: halfway between two codes, the even one is nearest."},
    {2, "subnormal", "Only subnormal values are wrong: e is 1 - bias, the field 0, not e + bias."},
    {2, "negative", "Only negative values are wrong: bit 7 is the sign, of zero as well."},
    {2, "E5M2", "Only E5M2 is wrong: use f.mantissa and f.bias in place of 3 and 7."},
    {2, "@one", "Every wrong code is one off: round to the nearest, do not cut off."},
    {3, "zeros", "Only a tensor of zeros is wrong: its scale is 1."},
    {3, "tiny", "Only tiny values are wrong: s is at least 2^-126, so that 1 / s is finite."},
    {3, "minus", "Only the tensor whose largest magnitude is negative is wrong: amax is of |x|."},
    {3, "fmax", "The scale is 128 times too small: 57344 is the largest value of E5M2; that of E4M3 is 448."},
    {3, "scale inverse", "This is 1 / s: return s = amax / 448."},
    {3, "scale", "The codes are right, the scale that is returned is not: s = amax / 448."},
    {3, "code @one @few", "A few codes are one off: multiply by 1 / s, rounded to FP32; do not divide by s."},
    {3, "code", "The scales are right, the codes are not: encode(x (1 / s))."},
    {4, "zeros", "Only a group of zeros is wrong: its scale is 1."},
    {4, "short", "Only the last, shorter group of a row is wrong: the next row begins a new group."},
    {4, "code", "The scales are right, the codes are not: divide by the scale after it is rounded to BF16."},
    {4, "exact", "These are scales in FP32. They are stored in BF16: given::to_bf16(amax / 448)."},
    {4, "near", "The scales are near: amax / 448 is rounded to the nearest BF16 value."},
    {5, "NaN", "Only NaN is wrong: a maximum drops it, because a comparison with NaN is false."},
    {5, "short", "Only the last, shorter group is wrong: stop at n, but do not leave it out."},
    {5, "minus", "Only tensors whose largest magnitude is negative are wrong: use |x|."},
    {5, "result", "The maxima are right, the result is not: it is the largest of them."},
    {5, "maximum", "The result is right, the maxima of the groups are not."},
    {6, "zero", "Only zero is wrong: expand(0) and contract(0) are 0."},
    {6, "equal", "Only equal magnitudes are wrong: log(max / min) is about 0, and k is 64."},
    {6, "extreme", "Only extreme magnitudes are wrong: a quotient or a power leaves the range of FP32."},
    {6, "negative", "Only negative values are wrong: expand and contract keep the sign."},
    {6, "limits", "Only k is wrong: it is at least 1/16 and at most 64; equal magnitudes give 64."},
    {6, "k near", "k is near: it is rounded to the nearest multiple of 1/256."},
    {6, "k", "Only k is wrong: log R / log(max / min), where R is 448 over the smallest value, 2^-9."},
    {6, "contract", "Only contract is wrong: it has the power 1 / k."},
    {6, "expand", "Only expand is wrong: it is 448 at |x| = max."},
    {7, "short", "Only a group with fewer than 128 parameters is wrong: what do the others add?"},
    {7, "allzero", "Only a group of zeros is wrong: max = 0, k = 1, and codes 0."},
    {7, "zeros", "Only groups with zeros are wrong: the smallest magnitude is of those above 0."},
    {7, "stored", "The weight uses the moments after quantization: use m and v before they are stored."},
    {7, "old", "The weight uses the old moments: use the new m and v."},
    {7, "uncorrected", "The bias correction is missing: m / bias1 and v / bias2."},
    {7, "inside", "eps is added to the root, not inside it."},
    {7, "w", "Only weights are wrong: compare with the formula; bias1, bias2 and decay, too."},
    {7, "k", "Only k is wrong: expansion_factor(max, min) of the new moment."},
    {7, "code", "Only codes are wrong: encode(expand(x, max, k)) with the new max and k."},
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
    {9, "dx", "Only dx is wrong: the means are those of one token, over its C values."},
    {10, "swapped", "gate and up are exchanged in the result: a row has dgate, then dup."},
    {10, "order", "gate and up are exchanged in the input: a row has gate, then up."},
    {10, "sigmoid", "This is the derivative of sigmoid; that of silu is s (1 + a (1 - s))."},
    {10, "scales", "up is decoded with the scales of gate: its own follow those in the row of scales."},
    {11, "cut", "Only matrices with cut tiles are wrong: compare with rows and cols before each access."},
    {11, "transposed oblong", "Only oblong matrices are wrong: a row of the transpose has `rows` values."},
    {11, "transposed", "Only the transpose is wrong: a __syncthreads(), or blockIdx.x and y exchanged?"},
    {11, "codes", "Only the row-major codes are wrong: codes[r * cols + c]."},
    {0, "negative", "Only negative values are wrong: where does the sign go?"},
    {0, "@one", "Every wrong code is one off: how is rounding done?"},
    {0, "@power", "All are off by the same power of two: look at the exponent and its bias."},
    {0, "@factor", "All are off by the same factor: look at the scale, or at what a mean divides by."},
    {0, "", "Compute this value by hand, or a smaller case of it, as the text above the function says."},
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

// What is compared of one exercise.
class Comparison {
public:
    static constexpr uint8_t UNWRITTEN = 0xFF;  // results are filled with it, or with NaN, beforehand
    bool blank = true;                          // nothing else has come

    Comparison(int number, judge::Out& out) : number_(number), out_(out) {}

    void value(const std::string& words, const std::string& input, double expected, double got,
               double tolerance = 0) {
        note(words, got != 0 && !std::isnan(got));
        const bool same =
            std::isnan(expected) ? std::isnan(got) : got == expected || std::abs(got - expected) <= tolerance;
        const bool sign = got != 0 || std::signbit(got) == std::signbit(expected);
        add(same && sign, {words, input, text(expected), text(got), got / expected, 1000});
    }
    void code(const std::string& words, const std::string& input, Format f, int expected, int got) {
        note(words, got != 0 && got != UNWRITTEN);
        const float e = reference::decode(f, uint16_t(expected)), g = reference::decode(f, uint16_t(got));
        add(got == expected, {words, input, hex(expected) + " = " + text(e), hex(got) + " = " + text(g),
                              double(g) / e, std::abs(got - expected)});
    }
    struct Mistake {
        std::string word;
        Floats result;
    };
    // A tensor, and what known mistakes would make of it. Three quarters of the wrong values are enough: on a
    // GPU, a code that is one off changes the others.
    void tensor(const std::string& words, const Floats& expected, const Floats& got,
                const std::vector<Mistake>& mistakes) {
        if (got.size() != expected.size())
            return value("size", words + ": number of values", double(expected.size()), double(got.size()));
        double largest = 0;
        for (float x : expected) largest = std::max(largest, std::abs(double(x)));
        auto near = [&](float x, float y) { return std::abs(x - y) <= 1e-4 * largest; };
        std::string mistake;
        for (const Mistake& m : mistakes) {
            size_t wrong = 0, like_this = 0;
            for (size_t i = 0; i < got.size(); i++)
                if (!near(expected[i], got[i])) wrong++, like_this += near(m.result[i], got[i]);
            if (like_this * 4 >= wrong * 3 && mistake.empty()) mistake = " " + m.word;
        }
        for (size_t i = 0; i < expected.size(); i++)
            value(words + mistake, text("element ", i, " of ", words), expected[i], got[i], 1e-4 * largest);
    }

    // tolerated: so many of a thousand codes may be one off, because logarithms differ in their last bits
    int finish(int tolerated = 0) {
        out_ << "exercise " << number_ << ": ";
        auto one_off = [](const Wrong& w) { return w.apart == 1; };
        const bool near = std::all_of(wrong_.begin(), wrong_.end(), one_off);
        if (wrong_.empty() || (near && wrong_.size() * 1000 <= count_ * tolerated)) {
            out_ << "passed, " << count_ << " values agree with the reference.\n";
            return 0;
        }
        if (blank) {
            out_ << "nothing is computed yet: write the body of the function.\n";
            return 1;
        }
        if (tolerated && !near)  // then they say nothing of the mistake
            wrong_.erase(std::remove_if(wrong_.begin(), wrong_.end(), one_off), wrong_.end());
        const Wrong& first = wrong_[0];
        out_ << wrong_.size() << " of " << count_ << " values differ. The first:\n  input     " << first.input
             << "\n  expected  " << first.expected << "\n  yours     " << first.got << "\n  hint      "
             << hint() << "\n";
        return 1;
    }

private:
    struct Wrong {
        std::string words, input, expected, got;
        double ratio;  // got / expected
        int apart;     // of two codes
    };

    static std::string result_of(const std::string& words) { return words.substr(0, words.find(' ')); }
    void note(const std::string& words, bool written) {
        blank = blank && !written;
        if (written) written_.insert(result_of(words));
    }
    void add(bool right, Wrong wrong) {
        count_++;
        if (!right) wrong_.push_back(std::move(wrong));
    }
    // On a GPU, k of a group may differ by 1/256, and all of its codes then: a tenth of the wrong values may
    // be without a word.
    bool matches(const std::string& words, const std::vector<Wrong>& wrong) const {
        const size_t allowed = number_ == 12 ? wrong.size() / 10 : 0;
        std::istringstream in(words);
        for (std::string word; in >> word;) {
            size_t without = word == "@few" && wrong.size() * 10 > count_ ? wrong.size() : 0;
            for (const Wrong& w : wrong) {
                const double quotient = w.ratio / wrong[0].ratio, power = std::log2(std::abs(w.ratio));
                const bool factor = std::abs(quotient - 1) <= 1e-4;
                const bool has = (" " + w.words + " ").find(" " + word + " ") != std::string::npos;
                without += word == "@one"      ? w.apart != 1
                           : word == "@factor" ? !factor
                           : word == "@power"  ? !factor || std::abs(power - std::rint(power)) > 1e-4
                                               : word != "@few" && !has;
            }
            if (without > allowed) return false;
        }
        return true;
    }
    // From what all wrong values have in common; else those of the same result, which is their first word;
    // else the first one, without the rows that compare it with others.
    std::string hint() const {
        const std::string result = result_of(wrong_[0].words);
        if (!written_.count(result) && result != "size") return "This is not computed yet: " + result + ".";
        std::vector<Wrong> same_result;
        for (const Wrong& w : wrong_)
            if (result_of(w.words) == result) same_result.push_back(w);
        const int own = number_ == 12 ? 7 : number_;
        for (int number : {own, 0})
            for (const auto& wrong : {wrong_, same_result})
                for (const Hint& h : HINTS)
                    if (h.number == number && *h.words && matches(h.words, wrong)) return h.text;
        for (const Hint& h : HINTS) {
            const std::string words = h.words, text = h.text;
            if (h.number == own && words.find("@f") == std::string::npos &&
                words.find("@p") == std::string::npos && matches(words, {wrong_[0]}))
                return "Values of several kinds are wrong. Of this one: " +
                       (text.find(": ") == std::string::npos ? text : text.substr(text.find(": ") + 2));
        }
        return std::end(HINTS)[-1].text;
    }

    int number_;
    judge::Out& out_;
    size_t count_ = 0;
    std::vector<Wrong> wrong_;
    std::set<std::string> written_;  // results that are not all zero
};

// The same inputs in every run, so that the first difference stays the same while it is looked for.
class Random {
public:
    Floats normal(int64_t n, float spread = 0) {  // spread: of the logarithms of their magnitudes
        Floats x(n);
        for (float& v : x) v = distribution_(engine_) * std::exp(spread * distribution_(engine_));
        return x;
    }

private:
    std::mt19937 engine_{1};
    std::normal_distribution<float> distribution_;
};

struct Case {  // an input of several exercises, and its word
    std::string words;
    Floats x;
};

Floats scales_of(const Quantized& q) {  // of 1x16 groups, row by row
    Floats scales;
    for (int64_t r = 0; r < q.rows; r++)
        for (int64_t c = 0; c < q.cols; c += 16) scales.push_back(q.scale(r, c));
    return scales;
}

}  // namespace

uint8_t given::encode(float x) { return uint8_t(reference::encode(Format::E4M3, x)); }
float given::decode(uint8_t code) { return reference::decode(Format::E4M3, code); }
float given::to_bf16(float x) { return reference::round_to(Format::BF16, x); }
float given::expansion_factor(float max, float min) {
    return reference::expansion_factor(Format::E4M3, max, min);
}
float given::expand(float x, float max, float k) { return reference::expand(Format::E4M3, x, max, k); }
float given::contract(float y, float max, float k) { return reference::contract(Format::E4M3, y, max, k); }

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
        throw std::runtime_error(text("given::product of ", a.rows, " x ", a.cols, " and ", b.rows, " x ",
                                      b.cols, ": the inner dimensions differ. Is one to be transposed?"));
    Matrix c{a.rows, b.cols, Floats(size_t(a.rows) * b.cols)};
    reference::matmul<float>(a.rows, b.cols, a.cols, {a.values.data(), a.cols, 1},
                             {b.values.data(), b.cols, 1}, c.values.data());
    return c;
}

int judge::decode(const Function<float(const Fp8&, uint8_t)>& decode, Out& out) {
    Comparison c(1, out);
    for (Format format : {Format::E4M3, Format::E5M2})
        for (int code = 0; code < 256; code++) {
            const Fp8& f = format == Format::E4M3 ? E4M3 : E5M2;
            const int exponent = (code & 0x7F) >> f.mantissa, top = 0x7F >> f.mantissa;
            const std::string name = format == Format::E4M3 ? "E4M3" : "E5M2";
            const std::string kind = exponent == 0 ? " subnormal" : exponent == top ? " top" : "";
            c.value(name + (code & 0x80 ? " negative" : "") + kind, name + " code " + hex(code),
                    reference::decode(format, uint16_t(code)), decode(f, uint8_t(code)));
        }
    return c.finish();
}

int judge::encode(const Function<uint8_t(const Fp8&, float)>& encode, Out& out) {
    Comparison c(2, out);
    for (Format format : {Format::E4M3, Format::E5M2}) {
        const Fp8& f = format == Format::E4M3 ? E4M3 : E5M2;
        const std::string name = format == Format::E4M3 ? "E4M3" : "E5M2";
        auto check = [&](const std::string& words, float x) {
            for (float y : {x, -x})
                c.code(name + words + (std::signbit(y) ? " negative" : ""),
                       text(name, ", x = ", y, words.empty() ? "" : ",", words), format,
                       reference::encode(format, y), encode(f, y));
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

int judge::quantize_tensor(const Function<float(int, const float*, uint8_t*)>& quantize, Out& out) {
    Comparison c(3, out);
    Random random;
    Floats minus = random.normal(200);
    minus[7] = -50;
    Floats ties = {3.7f};
    for (uint16_t code = 8; code < 0x7E; code++)
        ties.push_back((given::decode(code) + given::decode(code + 1)) / 2 * (3.7f / 448));
    for (const Case& input : {Case{"", random.normal(2000, 1)},
                              {" minus", minus},
                              {" zeros", Floats(40)},
                              {"", ties},
                              {" tiny", {1e-39f, -3e-40f, 0, 1e-45f}},
                              {"", random.normal(500, 9)}}) {
        const int n = int(input.x.size());
        const Quantized q = reference::quantize(input.x.data(), 1, n, {Format::E4M3});
        Codes codes(n, Comparison::UNWRITTEN);
        const float s = q.scale(0, 0), got = quantize(n, input.x.data(), codes.data());
        const std::string words = input.words + (std::abs(got / s * 128 - 1) < 1e-4 ? " fmax" : "") +
                                  (std::abs(got * s - 1) < 1e-4 ? " inverse" : ""),
                          of = text(" in a tensor with amax ", reference::amax(input.x.data(), n));
        c.value("scale" + words, "scale" + of, s, got, 1e-7 * s);
        for (int i = 0; i < n; i++)
            c.code("code" + words, text("code of x = ", input.x[i], of), Format::E4M3, q.codes[i], codes[i]);
    }
    return c.finish();
}

int judge::quantize_groups(const Function<void(int, int, const float*, uint8_t*, float*)>& quantize,
                           Out& out) {
    Comparison c(4, out);
    Random random;
    const int rows = 12;
    for (int cols : {64, 40}) {
        Floats x = random.normal(rows * cols);
        for (size_t i = 0; i < x.size(); i++) x[i] *= std::ldexp(1.0f, int(i / 16) % 9);
        std::fill_n(x.begin(), 16, 0.0f);
        const Quantized q = reference::quantize(x.data(), rows, cols, Q_GROUP);
        Codes codes(x.size(), Comparison::UNWRITTEN);
        Floats scales(scales_of(q).size(), NAN);
        quantize(rows, cols, x.data(), codes.data(), scales.data());
        for (int r = 0, group = 0; r < rows; r++)
            for (int first = 0; first < cols; first += 16, group++) {
                const int begin = r * cols + first, n = std::min(16, cols - first);
                const float amax = reference::amax(x.data() + begin, n), s = q.scale(r, first);
                const float got = scales[group];
                const std::string words =
                    text(n < 16 ? " short" : "", amax == 0 ? " zeros" : "", got == amax / 448 ? " exact" : "",
                         got != s && std::abs(got / s - 1) < 0.01f ? " near" : "");
                const std::string of = text(" in row ", r, ", group ", first / 16, ", with amax ", amax);
                c.value("scale" + words, "scale" + of, s, got);
                for (int i = begin; i < begin + n; i++)
                    c.code("code" + words, text("code of x = ", x[i], of), Format::E4M3, q.codes[i],
                           codes[i]);
            }
    }
    return c.finish();
}

int judge::amax(const Function<float(int, const float*, float*)>& amax, Out& out) {
    Comparison c(5, out);
    Random random;
    Floats minus = random.normal(64), nan = random.normal(80), last = random.normal(40);
    for (int i = 5; i < 64; i += 16) minus[i] = float(-9 - i);
    nan[20] = NAN, nan[35] = 100, nan[79] = -NAN, last[39] = 77;
    for (const Case& input : {Case{"", random.normal(1024, 1)},
                              {"", Floats(16)},
                              {" minus", minus},
                              {" short", last},
                              {" short", {3.5f}},
                              {" NaN", nan},
                              {" short", {1, -INFINITY}}}) {
        const int n = int(input.x.size()), groups = (n + 15) / 16;
        Floats maxima(groups, NAN);
        const float got = amax(n, input.x.data(), maxima.data());
        const std::string of = text(" of ", n, " values", input.words);
        for (int g = 0; g < groups; g++)
            c.value("maximum" + input.words, text("maximum of group ", g, of),
                    reference::amax(input.x.data() + g * 16, std::min(16, n - g * 16)), maxima[g]);
        c.value("result" + input.words, "amax" + of, reference::amax(input.x.data(), n), got);
    }
    return c.finish();
}

int judge::expansion(const Function<float(float, float)>& expansion_factor,
                     const Function<float(float, float, float)>& expand,
                     const Function<float(float, float, float)>& contract, Out& out) {
    Comparison c(6, out);
    Random random;
    auto check = [&](const std::string& words, float max, float min) {
        const float k = given::expansion_factor(max, min);
        const double exact = 256 * std::log2(448 * 512.0) / (std::log2(double(max)) - std::log2(double(min)));
        const bool border = std::abs(exact - std::floor(exact) - 0.5) < 0.01;  // both neighbours are right
        const float got = expansion_factor(max, min);
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
    for (float magnitude : random.normal(40))
        check("", std::exp(magnitude), std::exp(-1 - 3 * magnitude * magnitude));
    check(" equal", 3, 3), check(" equal", 1, 0.999f);
    check(" extreme", 1e30f, 1e-30f), check(" extreme", 1e38f, 1e-44f), check(" extreme", 1e-30f, 1e-38f);
    c.value("zero", "expand of x = 0, max = 2, k = 3", 0, expand(0, 2, 3));
    c.value("zero", "contract of y = 0, max = 2, k = 3", 0, contract(0, 2, 3));
    return c.finish();
}

int judge::adamw(const Function<void(const Step&, int, const float*, float*, Moment, Moment)>& adamw,
                 Out& out, int number) try {
    Comparison c(number, out);
    Random random;
    const Step s{0.01f, 0.9f, 0.95f, 0.01f, 0.1f, 0.271f, 0.142625f};  // the third step
    const reference::AdamWFactors factors{s.lr,  s.beta1, s.beta2, 1 - s.beta1,        1 - s.beta2,
                                          s.eps, s.decay, s.bias1, std::sqrt(s.bias2), 1.0f};
    bool changed = false;
    for (int round = 0; round < 24; round++) {
        const bool zeros = round % 4 == 2, all_zero = round == 4, small = round % 4 == 3;
        const int groups = number == 7 ? 1 : 1 + round % 5, n = 128 * groups - (small ? 91 : 0);
        const std::string words = small ? " short" : zeros ? " zeros" : all_zero ? " allzero" : "";
        const Floats before = random.normal(n);
        Floats g = random.normal(n, 1), w = before, old_m = random.normal(n, float(round % 3) / 2),
               old_v = random.normal(n);
        for (int i = 0; i < n; i++) {
            old_v[i] *= old_v[i];
            if (all_zero || (zeros && i % 7 == 0)) g[i] = old_m[i] = old_v[i] = 0;
        }
        reference::Moment m, v;
        m.init(Format::E4M3, true, n), v.init(Format::E4M3, true, n);
        m.store(old_m.data(), false), v.store(old_v.data(), true);
        reference::Moment my_m = m, my_v = v;
        Floats my_w = before;
        adamw(s, n, g.data(), my_w.data(), {my_m.codes.data(), my_m.max.data(), my_m.k.data()},
              {my_v.codes.data(), my_v.max.data(), my_v.k.data()});
        changed = changed || my_w != before || my_m.codes != m.codes;
        m.load(old_m.data()), v.load(old_v.data());
        Floats new_m = old_m, new_v = old_v, stored_m(n), stored_v(n);
        reference::adamw(factors, n, g.data(), w.data(), new_m.data(), new_v.data());
        m.store(new_m.data(), false), v.store(new_v.data(), true);
        m.load(stored_m.data()), v.load(stored_v.data());

        // Of weights, the change is compared: it is small, and a mistake in it even smaller.
        auto change = [&](const Floats& m, const Floats& v, float bias1, float bias2, float inside,
                          float eps) {
            Floats d(n);
            for (int i = 0; i < n; i++)
                d[i] =
                    -s.lr * (m[i] / bias1 / (std::sqrt(v[i] / bias2 + inside) + eps) + s.decay * before[i]);
            return d;
        };
        for (int i = 0; i < n; i++) w[i] -= before[i], my_w[i] -= before[i];
        c.tensor("w" + words, w, my_w,
                 {{"stored", change(stored_m, stored_v, s.bias1, s.bias2, 0, s.eps)},
                  {"old", change(old_m, old_v, s.bias1, s.bias2, 0, s.eps)},
                  {"uncorrected", change(new_m, new_v, 1, 1, 0, s.eps)},
                  {"inside", change(new_m, new_v, s.bias1, s.bias2, s.eps, 0)}});
        for (const auto& [name, expected, got] : {std::tuple{"m", &m, &my_m}, {"v", &v, &my_v}}) {
            for (int i = 0; i < groups; i++) {
                const std::string of = text(" of ", name, ", group ", i, words);
                c.value("max" + words, "max" + of, expected->max[i], got->max[i], 1e-5 * expected->max[i]);
                c.value("k" + words, "k" + of, expected->k[i], got->k[i], 1.001 / 256);
            }
            for (int i = 0; i < n; i++)
                c.code("code" + words, text("code ", i, " of ", name, words), Format::E4M3,
                       expected->codes[i], got->codes[i]);
        }
    }
    c.blank = !changed;
    return c.finish(10);
} catch (const std::runtime_error& error) {
    out << "exercise " << number << ": " << error.what() << "\n";
    return 1;
}

int judge::linear(const Function<Linear>& linear, Out& out) try {
    Comparison c(8, out);
    Random random;
    // Rows and columns of different magnitudes, so that it matters which values share a scale. The sizes are
    // no multiples of 128.
    auto matrix = [&](int rows, int cols) {
        Matrix x{rows, cols, random.normal(rows * cols)};
        const Floats by_row = random.normal(rows), by_col = random.normal(cols);
        for (int i = 0; i < rows * cols; i++) x.values[i] *= std::exp(by_row[i / cols] + by_col[i % cols]);
        return x;
    };
    const Matrix x = matrix(200, 160), w = matrix(144, 160), g = matrix(200, 144);
    Matrix y, dx, dw;
    linear(x, w, g, y, dx, dw);
    auto operand = [](const Matrix& m, Granularity blocks, ReduceOver over) {
        return Matrix{m.rows, m.cols,
                      reference::operand(m.values, m.rows, m.cols, {Format::E4M3, blocks}, over)};
    };
    const Matrix w8 = operand(w, PER_128x128, ReduceOver::Columns),
                 w_lines = operand(w, PER_1x128, ReduceOver::Columns),
                 w_columns = operand(w, PER_1x128, ReduceOver::Rows);
    const Matrix x8 = operand(x, PER_1x128, ReduceOver::Columns),
                 x_tokens = operand(x, PER_1x128, ReduceOver::Rows);
    const Matrix g8 = operand(g, PER_1x128, ReduceOver::Columns),
                 g_tokens = operand(g, PER_1x128, ReduceOver::Rows);
    auto fprop = [](const Matrix& x, const Matrix& w) {
        return given::product(x, given::transposed(w)).values;
    };
    auto dgrad = [](const Matrix& g, const Matrix& w) { return given::product(g, w).values; };
    auto wgrad = [](const Matrix& g, const Matrix& x) {
        return given::product(given::transposed(g), x).values;
    };
    c.tensor("y", fprop(x8, w8), y.values,
             {{"unquantized", fprop(x, w)}, {"rows", fprop(x_tokens, w8)}, {"blocks", fprop(x8, w_lines)}});
    c.tensor("dx", dgrad(g8, w8), dx.values,
             {{"unquantized", dgrad(g, w)}, {"rows", dgrad(g_tokens, w8)}, {"blocks", dgrad(g8, w_columns)}});
    c.tensor("dw", wgrad(g_tokens, x_tokens), dw.values,
             {{"unquantized", wgrad(g, x)},
              {"columns", wgrad(g8, x8)},
              {"oneg", wgrad(g8, x_tokens)},
              {"onex", wgrad(g_tokens, x8)},
              {"twice",
               wgrad(operand(g8, PER_1x128, ReduceOver::Rows), operand(x8, PER_1x128, ReduceOver::Rows))}});
    return c.finish();
} catch (const std::runtime_error& error) {
    out << "exercise 8: " << error.what() << "\n";
    return 1;
}

int judge::norm_backward(const Function<Backward>& backward, Out& out) {
    Comparison c(9, out);
    Random random;
    const int N = 24, C = 96;
    Floats x = random.normal(N * C, 1), weight = random.normal(C, 0.3f), dy = random.normal(N * C);
    for (int i = 0; i < C; i++) x[3 * C + i] *= 1e-3f;  // a token in which eps counts
    const Quantized q = reference::quantize(x.data(), N, C, Q_GROUP);
    Floats dx(N * C, NAN), dweight(C, NAN), undecoded, sum, all_but_last;
    backward(N, C, q.codes.data(), scales_of(q).data(), weight.data(), dy.data(), dx.data(), dweight.data());
    for (uint8_t code : q.codes) undecoded.push_back(given::decode(code));
    auto gradient = [&](int rows, const Floats& w, const Floats& x, Floats& dw) {
        Floats result(N * C);
        dw.assign(C, 0);
        reference::norm_backward<float>(true, 1e-5f, rows, C, x.data(), w.data(), dy.data(), result.data(),
                                        dw.data(), nullptr);
        return result;
    };
    x = dequantize(q);
    Floats no_mean(N * C), ones(C, 1.0f), y(N * C);
    reference::norm_forward<float>(true, 1e-5f, N, C, x.data(), ones.data(), nullptr, y.data());
    for (int i = 0; i < N * C; i++) no_mean[i] = x[i] == 0 ? 0 : dy[i] * weight[i % C] * y[i] / x[i];
    c.tensor("dx", gradient(N, weight, x, sum), dx,
             {{"nomean", no_mean},
              {"noweight", gradient(N, ones, x, all_but_last)},
              {"noscale", gradient(N, weight, undecoded, all_but_last)}});
    gradient(N - 1, weight, x, all_but_last);
    Floats last = sum;
    for (int i = 0; i < C; i++) last[i] -= all_but_last[i];
    c.tensor("dweight", sum, dweight, {{"last", last}});
    return c.finish();
}

int judge::swiglu_backward(
    const Function<void(int, int, const uint8_t*, const float*, const float*, float*)>& backward, Out& out) {
    Comparison c(10, out);
    Random random;
    const int N = 20, F = 48, row = 2 * F;
    Floats gate_up = random.normal(N * row, 0.7f), dact = random.normal(N * F), got(N * row, NAN);
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
              {"order", gradient(swapped(x))},
              {"sigmoid", sigmoid},
              {"scales", gradient(gate_scales)}});
    return c.finish();
}

int judge::quantize_transpose(
    const Function<void(int, int, float, const float*, uint8_t*, uint8_t*)>& quantize, Out& out) try {
    Comparison c(11, out);
    Random random;
    for (const auto& [rows, cols] : {std::pair{64, 64}, {32, 96}, {1, 1}, {100, 37}, {33, 160}}) {
        const Floats x = random.normal(rows * cols, 1);
        const float inverse = 448 / reference::amax(x.data(), rows * cols);
        Codes codes(x.size(), Comparison::UNWRITTEN), transposed = codes;
        quantize(rows, cols, inverse, x.data(), codes.data(), transposed.data());
        const std::string words = text(rows % 32 || cols % 32 ? " cut" : "", rows != cols ? " oblong" : "");
        for (int i = 0; i < rows * cols; i++) {
            const int r = i / cols, col = i % cols, expected = given::encode(x[i] * inverse);
            const std::string at = text("code of row ", r, ", column ", col, " of ", rows, " x ", cols);
            c.code("codes" + words, at, Format::E4M3, expected, codes[i]);
            c.code("transposed" + words, "transposed " + at, Format::E4M3, expected,
                   transposed[col * rows + r]);
        }
    }
    return c.finish();
} catch (const std::runtime_error& error) {
    out << "exercise 11: " << error.what() << "\n";
    return 1;
}
