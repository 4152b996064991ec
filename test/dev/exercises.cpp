// exercises.cpp - dev/exercises: what the judge says of an empty body, of a solution, and of typical
// mistakes. MISTAKES is the list of these. A solution below is given one of them in words, or "" for none.
#include <sys/wait.h>
#include <unistd.h>

#include "../../dev/exercises/capstone.h"
#include "../help/exercises.h"

#define main JOINED(main_, __COUNTER__)  // the exercises as they are in the repository, each with a main()
#define JOINED(name, number) JOINED_(name, number)
#define JOINED_(name, number) name##number
namespace empty {
#include "../../dev/exercises/01-decode.cpp"
#include "../../dev/exercises/02-quantize-tensor.cpp"
#include "../../dev/exercises/03-quantize-to-groups.cpp"
#include "../../dev/exercises/04-amax.cpp"
#include "../../dev/exercises/05-encode.cpp"
#include "../../dev/exercises/06-expansion.cpp"
#include "../../dev/exercises/07-adamw.cpp"
#include "../../dev/exercises/08-linear.cpp"
namespace blocks {
#include "../../dev/exercises/09-linear-blocks.cpp"
}
#include "../../dev/exercises/10-norm-backward.cpp"
#include "../../dev/exercises/11-swiglu-backward.cpp"
#include "../../dev/exercises/15-choose.cpp"
#include "../../dev/exercises/16-saved.cpp"
namespace bugs {
#include "../../dev/exercises/17-find-the-bugs.cpp"
}
}  // namespace empty
#undef main

// A namespace of its own, because the solutions have the names of functions of the reference.
namespace exercises {
namespace {

using namespace coat;
using namespace coat::test;
using Floats = std::vector<float>;
// A mistake in words, or several, joined by " and ".
struct Words : std::string {
    using std::string::string;
    bool operator==(const char* one) const {
        return contains(" and " + *this + " and ", concat(" and ", one, " and "));
    }
};
using Bytes = const uint8_t*;
using Vector = const float*;

struct Mistake {
    int exercise;
    Words mistake;
    const char* hint;  // the judge's must contain this
};

const std::vector<Mistake> MISTAKES = {
    {1, "bias + 1", "off by the factor 0.5"},
    {1, "subnormal values have a 1 in front", "the mantissa has no 1 in front"},
    {1, "no value has a 1 in front", "The mantissa has a 1 in front"},
    {1, "subnormal exponent 0 - bias", "the exponent is that of field 1"},
    {1, "the mantissa is not divided", "The mantissa m is a fraction"},
    {1, "the mantissa is divided as an integer", "m / 8 of two integers is an integer"},
    {1, "no sign", "Bit 7 is the sign"},
    {1, "E4M3 has infinity", "E4M3 has no infinity"},
    {1, "E4M3 has no NaN", "In E4M3 the largest mantissa of the largest exponent is NaN"},
    {1, "E5M2 has neither infinity nor NaN", "In E5M2 the largest exponent is for infinity"},

    {2, "FMAX of E5M2", "57344 is that of E5M2"},
    {2, "divides by s", "do not divide by s"},
    {2, "signed amax", "take |x|"},
    {2, "zero scale", "A scale of 0"},
    {2, "no smallest scale", "at least 2^-126"},
    {2, "returns 1 / s", "Return s, not 1 / s"},
    {2, "returns amax", "This is amax itself"},
    {2, "codes without the scale", "the code of x, without the scale"},
    {2, "multiplies by s", "Multiply by 1 / s, not by s"},
    {2, "divides by s and signed amax", "take |x|"},  // the scale comes first
    {2, "reads x[n]", "read x[0] to x[n - 1]"},
    {2, "writes past the end", "You write past the end of code"},
    {2, "abs of an int", "abs() takes an int"},
    {2, "clamps before scaling", "Values are not clamped before they are scaled"},
    {2, "amax at least 1e-12", "amax has no least value"},
    {2, "max - min", "max - min is for integers"},
    {2, "casts to uint8_t", "cast to 8 bits"},
    {2, "FMAX of AMD's E4M3", "240 is the largest value"},

    {3, "scale not rounded", "Scales are stored in BF16"},
    {3, "scale cut off", "BF16 is rounded to the nearest, not cut off"},
    {3, "code with the unrounded scale", "use the scale after it is rounded to BF16.\n"},
    {3, "divides by s", "do not divide by s"},
    {3, "no smallest scale", "at least 2^-126"},
    {3, "groups cross rows", "A group does not cross to the next row"},
    {3, "the last group reads 16 values", "The last group of a row may be shorter"},
    {3, "signed amax", "take |x|"},
    {3, "zero scale", "A scale of 0"},
    {3, "FMAX of E5M2", "57344 is that of E5M2"},
    {3, "one scale for all", "Each group has a scale of its own"},
    {3, "scales column by column", "Scales are stored row by row"},

    {4, "reads past n", "You read past the end of x"},
    {4, "leaves out the last group", "The last, shorter group is missing"},
    {4, "signed maximum", "take |x|"},
    {4, "NaN lost", "NaN gets lost: a comparison with it is false"},
    {4, "NaN lost at the next value", "NaN gets lost at the next value"},
    {4, "NaN stays NaN", "is infinity here, not NaN"},
    {4, "begins with what maxima contains", "maxima is undefined before"},
    {4, "returns the last maximum", "This is the maximum of the last group"},
    {4, "16 groups", "not 16 groups"},
    {4, "never reset", "The maximum of the groups before goes on"},
    {4, "neighbours in different groups", "A group is 16 neighbours"},
    {4, "scales in place of maxima", "This is a scale"},
    {4, "amax without NaN", "NaN gets lost on the way to amax"},
    {4, "abs of an int", "abs() takes an int"},

    {5, "no saturation", "Values above f.max, infinity too, saturate"},
    {5, "no clamp of subnormal values", "Below the smallest normal value"},
    {5, "masked carry", "the mantissa's carry belongs to the exponent"},
    {5, "masked carry of subnormal values too", "the mantissa's carry belongs to the exponent"},
    {5, "the 1 in front is masked off", "a carry is lost, and a subnormal value"},
    {5, "ties away", "A tie goes to the even code"},
    {5, "truncation", "The count is cut off"},
    {5, "rounds up", "The count is rounded up"},
    {5, "no sign", "Bit 7 is the sign"},
    {5, "sign by x < 0", "Zero and NaN have signs, too"},
    {5, "NaN saturates", "NaN does not saturate"},
    {5, "sign by x < 0 and ties away",
     "wrong values: A tie goes to the even code"},  // -0 is the first of them
    {5, "the 1 in front is counted twice", "it adds 1 to the exponent field"},
    {5, "log2 cut off", "cut off towards zero"},
    {5, "M = 3 always", "E5M2 has two bits of mantissa"},
    {5, "0x7E always", "they have the code of f.max"},
    {5, "overflows as in PyTorch", "they have the code of f.max"},
    {5, "the 1 in front is subtracted everywhere", "A subnormal value has no 1 in front"},
    {5, "no bias", "The exponent field is e + bias"},

    {6, "2^-6 as minimum", "The smallest code that is not zero is subnormal"},
    {6, "2^-6 as minimum and k not limited at 64", "This one makes 43 of the 45 wrong values: The smallest"},
    {6, "1 as minimum", "The range ends at the smallest value"},
    {6, "k inverted", "This is upside down"},
    {6, "divides max by min", "max / min overflows here"},
    {6, "ln of the ratio", "One logarithm is natural"},
    {6, "ln of the range", "One logarithm is natural"},
    {6, "k at least 1", "k may be below 1"},
    {6, "k not limited at 64", "k is at most 64"},
    {6, "k not limited at 64 and not rounded", "k is neither rounded"},
    {6, "floor to 1/16", "Round to multiples of 1/256, not of 1/16"},
    {6, "nearest 1/16", "Round to multiples of 1/256, not of 1/16"},
    {6, "floor to 1/256", "k is near: round to the nearest multiple of 1/256"},
    {6, "ln of 448", "448 has its natural logarithm"},
    {6, "ln of 2^-9", "2^-9 has its natural logarithm"},
    {6, "range of another format", "No typical mistake makes these values"},  // better than a wrong hint
    {6, "expand loses the sign", "The result has the sign of the input"},
    {6, "expand to 1", "max becomes 448"},
    {6, "expand not relative to max", "Divide |x| by max"},
    {6, "expand to the power 1 / k", "expand raises to the power k"},
    {6, "expand of zero is NaN", "about zero"},
    {6, "expand divides x by max", "|x| / max underflows here"},
    {6, "contract loses the sign", "The result has the sign of the input"},
    {6, "contract to 1", "448 becomes max"},
    {6, "contract to the power k", "contract raises to the power 1 / k"},
    {6, "contract to the power 2 / k", "This is the power 2 / k"},
    {6, "contract to the power 1 / 2k", "This is the power 1 / (2 k)"},
    {6, "contract underflows", "The power underflows here"},
    {6, "expand divides x by max and contract to the power k", "contract raises to the power 1 / k"},
    {6, "contract is empty", "This is not computed yet: contract."},

    {7, "bias2 outside the root", "bias2 belongs inside the square root"},
    {7, "eps inside the root", "eps is added to the square root"},
    {7, "g not squared", "g is not squared"},
    {7, "no expansion", "Loading a moment includes the expansion's inverse"},
    {7, "stores without expansion", "k is 1 everywhere"},
    {7, "moments quantized first", "Update the weight before the moments are quantized"},
    {7, "no bias correction", "The bias correction is missing"},
    {7, "decay coupled into g", "Weight decay is decoupled"},
    {7, "no decay", "The weight decay is missing"},
    {7, "decay without learning rate", "The learning rate multiplies the weight decay"},
    {7, "no root", "divided by the square root"},
    {7, "adds the update", "The update is subtracted"},
    {7, "all of g", "g is multiplied by 1 - beta1"},
    {7, "zeros count in min", "Zeros do not count in the smallest magnitude"},
    {7, "codes with the old max and k", "The codes belong to the new max and k"},
    {7, "signed max", "take |x|"},
    {7, "eps before the bias correction", "eps is added after the bias correction"},
    {7, "bias1 and bias2 exchanged", "bias1 belongs to m"},
    {7, "betas exchanged", "beta1 belongs to m"},
    {7, "no learning rate", "The learning rate is missing"},
    {7, "decays the moved weight", "of the weight before the step"},
    {7, "signed min", "may not be negative"},
    {7, "min begins with 0", "must not begin with 0"},
    {7, "v with max and k of m", "a max and a k of their own"},

    {8, "x quantized in fprop only", "x is quantized in fprop, but not in wgrad"},
    {8, "g quantized in dgrad only", "g is quantized in dgrad, but not in wgrad"},
    {8, "g in E4M3", "Gradients are quantized in E5M2"},
    {8, "w unquantized", "w is not quantized in fprop"},
    {8, "w unquantized in dgrad", "w is not quantized in dgrad"},
    {8, "all in E5M2", "x and w are in E4M3"},
    {8, "nothing quantized", "quantize both"},
    {8, "blocks", "COAT has one scale for a tensor"},
    {8, "y quantized", "The result is not quantized"},
    {8, "dx quantized", "The result is not quantized"},
    {8, "dw quantized", "The result is not quantized"},
    {8, "dw transposed", "This is the transpose"},
    {8, "no scales", "multiply it by both scales"},
    {8, "scale of a", "only the scale of a"},
    {8, "scale of b", "only the scale of b"},
    {8, "all codes as E4M3", "Each matrix has a format of its own"},
    {8, "w as it is in dgrad", "Which operands must be transposed"},
    {8, "x as it is in wgrad", "Which operands must be transposed"},

    {9, "w in 1x128", "w has blocks of 128x128, not of 1x128"},
    {9, "wgrad's blocks along features", "first transpose both"},
    {9, "wgrad's x along features", "the blocks of x lie along features"},
    {9, "wgrad's g along features", "the blocks of g lie along features"},
    {9, "wgrad unquantized", "quantize both"},
    {9, "no transposes", "Is one of them to be transposed?"},
    {9, "one scale for a tensor", "as in exercise 8"},
    {9, "wgrad quantizes quantized values again", "quantizes what is quantized already"},
    {9, "g as in exercise 8", "E5M2 with one scale is that of exercise 8"},
    {9, "all in 128x128", "only w has 128x128"},
    {9, "x stays transposed in wgrad", "Is one of them to be transposed?"},
    {9, "y quantized", "The result is not quantized"},

    {10, "sum for mean", "a mean over the token's C values, not their sum"},
    {10, "adds to dweight", "This is undefined before the call: set dweight to zero"},
    {10, "no mean term", "The term with the mean is missing"},
    {10, "mean term added", "The term with the mean is subtracted"},
    {10, "no scale", "times its group's scale"},
    {10, "scales of the first token", "Each token has C / 16 scales of its own"},
    {10, "the last token only", "not of the last"},
    {10, "no eps", "eps is missing"},
    {10, "sum in the root", "r has the mean of x^2, not the sum"},
    {10, "no weight", "weight is missing"},
    {10, "r squared", "r^3, not r^2"},
    {10, "weight in dweight", "without the weight"},

    {11, "rows of F values", "A row has 2 F values"},
    {11, "no scale", "times its group's scale"},
    {11, "scales of gate for up", "up has scales of its own"},
    {11, "rows of F / 16 scales", "A row of scales has 2 F / 16"},
    {11, "derivative of sigmoid", "This is the derivative of sigmoid"},
    {11, "silu for its derivative", "silu itself in place of its derivative"},
    {11, "swapped", "a row has dgate, then dup"},
    {11, "gate and up alternate", "they do not alternate"},
    {11, "no up", "dgate is multiplied by up"},
    {11, "no silu", "dup has silu(gate)"},
    {11, "adds to dgate_up", "This is undefined before the call"},

    {15, "no format for F", "tensor F has no format yet"},
    {15, "groups for A", "Groups win little here"},
    {15, "E4M3 for B", "lose precision: how many are there"},
    {15, "E5M2 for C", "E4M3 has a bit more precision"},
    {15, "one scale for D", "Groups win here"},
    {15, "E5M2 for E", "E4M3 has a bit more precision"},
    {15, "groups for F", "lose precision: how many are there"},

    {16, "norm outputs saved", "It follows from the norm's input"},
    {16, "gate and up are operands", "SiLU(gate) x up reads it"},
    {16, "gradients in E4M3", "COAT's format of gradients"},
    {16, "A is missing", "tensor A: look again at saved"},
};

auto decode(const Words& mistake) {
    const bool one_always = mistake == "subnormal values have a 1 in front";
    const bool no_one = mistake == "no value has a 1 in front";
    const bool field_0 = mistake == "subnormal exponent 0 - bias";
    const bool whole = mistake == "the mantissa is not divided";
    const bool integer = mistake == "the mantissa is divided as an integer";
    const bool no_sign = mistake == "no sign";
    const bool infinity = mistake == "E4M3 has infinity";
    const bool no_nan = mistake == "E4M3 has no NaN";
    const bool finite = mistake == "E5M2 has neither infinity nor NaN";
    const int more = mistake == "bias + 1";
    return [=](const Fp8& f, uint8_t code) -> float {
        const int one = 1 << f.mantissa, e = (code >> f.mantissa) & (f.mantissa == 3 ? 15 : 31);
        const int m = code & (one - 1);
        const float sign = code >= 128 && !no_sign ? -1 : 1;
        if (f.mantissa == 3 && (code & 127) == 127 && !no_nan) return NAN;
        if (f.mantissa == 3 && e == 15 && infinity) return m == 0 ? sign * INFINITY : NAN;
        if (f.mantissa == 2 && e == 31 && !finite) return m == 0 ? sign * INFINITY : NAN;
        float fraction = whole ? float(m) : float(m) / float(one);
        if (integer) fraction = float(m / one);
        const bool subnormal = e == 0;
        const float significand = (subnormal && !one_always) || no_one ? fraction : 1 + fraction;
        const int exponent = subnormal && !field_0 ? 1 : e;
        return sign * significand * std::exp2(float(exponent - f.bias - more));
    };
}

float amax_of(const float* x, int n, bool is_signed) {
    float largest = 0;
    for (int i = 0; i < n; i++) largest = std::max(largest, is_signed ? x[i] : std::abs(x[i]));
    return largest;
}

auto quantize_tensor(const Words& mistake) {
    return [=](int n, const float* x, uint8_t* codes) -> float {
        float fmax = 448;
        if (mistake == "FMAX of E5M2") fmax = 57344;
        if (mistake == "FMAX of AMD's E4M3") fmax = 240;
        float amax = amax_of(x, n + (mistake == "reads x[n]"), mistake == "signed amax");
        if (mistake == "abs of an int") amax = std::floor(amax);
        if (mistake == "clamps before scaling") amax = std::min(amax, 448.0f);
        if (mistake == "amax at least 1e-12") amax = std::max(amax, 1e-12f);
        if (mistake == "max - min") amax = *std::max_element(x, x + n) - *std::min_element(x, x + n);
        float s = amax / fmax;
        if (mistake != "no smallest scale") s = std::max(s, 0x1p-126f);
        if (amax == 0) s = mistake == "zero scale" ? 0 : 1;
        for (int i = 0; i < n + (mistake == "writes past the end"); i++) {
            float y = x[i] * (1 / s);
            if (mistake == "divides by s") y = x[i] / s;
            if (mistake == "codes without the scale") y = x[i];
            if (mistake == "multiplies by s") y = x[i] * s;
            codes[i] = mistake == "casts to uint8_t" ? uint8_t(int(y)) : given::encode(y);
        }
        if (mistake == "returns 1 / s") return 1 / s;
        return mistake == "returns amax" ? amax : s;
    };
}

auto quantize_to_groups(const Words& mistake) {
    return [=](int rows, int cols, const float* x, uint8_t* codes, float* scales) {
        if (mistake == "groups cross rows") {
            cols *= rows;
            rows = 1;
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < cols; c += 16) {
                const int first = r * cols + c;
                const int n = mistake == "the last group reads 16 values" ? 16 : std::min(16, cols - c);
                float amax = amax_of(x + first, n, mistake == "signed amax");
                if (mistake == "one scale for all") amax = amax_of(x, rows * cols, false);
                float s = amax / (mistake == "FMAX of E5M2" ? 57344 : 448);
                if (mistake != "no smallest scale") s = std::max(s, 0x1p-126f);
                if (amax == 0) s = 1;
                float rounded = given::to_bf16(s);
                if (mistake == "scale not rounded") rounded = s;
                if (mistake == "scale cut off")
                    rounded = std::bit_cast<float>(std::bit_cast<uint32_t>(s) & 0xFFFF0000);
                if (amax == 0 && mistake == "zero scale") rounded = 0;
                const int groups = (cols + 15) / 16, by_rows = r * groups + c / 16;
                scales[mistake == "scales column by column" ? c / 16 * rows + r : by_rows] = rounded;
                const float divisor = mistake == "code with the unrounded scale" ? s : rounded;
                for (int i = first; i < first + n; i++)
                    codes[i] =
                        given::encode(mistake == "divides by s" ? x[i] / rounded : x[i] * (1 / divisor));
            }
    };
}

auto amax(const Words& mistake) {
    return [=](int n, const float* x, float* maxima) {
        int groups = mistake == "leaves out the last group" ? n / 16 : (n + 15) / 16, width = 16;
        if (mistake == "16 groups") {
            groups = 16;
            width = (n + 15) / 16;
        }
        const bool strided = mistake == "neighbours in different groups";
        float all = 0, largest = 0;
        for (int g = 0; g < groups; g++) {
            if (mistake != "never reset") largest = 0;
            if (mistake == "begins with what maxima contains") largest = maxima[g];
            const int end = mistake == "reads past n" ? 16 * g + 16 : std::min(n, width * g + width);
            for (int i = width * g; i < end; i++) {
                float v = std::abs(x[i]);
                if (strided) v = std::abs(x[i % 16 * groups + g]);
                if (mistake == "signed maximum") v = x[i];
                if (mistake == "abs of an int") v = std::floor(v);
                if (std::isnan(v) && mistake == "NaN stays NaN") largest = NAN;
                else if (std::isnan(v) && mistake == "NaN lost at the next value") largest = NAN;
                else if (std::isnan(v) && mistake != "NaN lost") largest = INFINITY;
                if (mistake == "NaN lost at the next value")
                    largest = v > largest || largest != largest ? v : largest;
                else largest = v > largest ? v : largest;
            }
            maxima[g] = mistake == "scales in place of maxima" ? largest / 448 : largest;
            all = mistake == "returns the last maximum" ? largest : std::max(all, largest);
        }
        if (mistake == "amax without NaN") {
            all = 0;
            for (int i = 0; i < n; i++) all = std::max(all, std::abs(x[i]));
        }
        return all;
    };
}

auto encode(const Words& mistake) {
    return [=](const Fp8& f, float x) {
        const int M = mistake == "M = 3 always" ? 3 : f.mantissa;
        const int one = 1 << M, largest = f.mantissa == 3 || mistake == "0x7E always" ? 0x7E : 0x7B;
        int sign = std::signbit(x) ? 0x80 : 0;
        if (mistake == "no sign") sign = 0;
        if (mistake == "sign by x < 0") sign = x < 0 ? 0x80 : 0;
        const float size = std::abs(x);
        if (std::isnan(x)) return sign | (mistake == "NaN saturates" ? largest : 0x7F);
        if (mistake == "overflows as in PyTorch" &&
            size > f.max * (f.mantissa == 3 ? 464 / 448.0 : 61440 / 57344.0))
            return sign | (f.mantissa == 3 ? 0x7F : 0x7C);
        if (std::isinf(x)) return sign | (mistake == "no saturation" ? 0x7F : largest);
        if (size > f.max && mistake != "no saturation") return sign | largest;
        int e = size == 0 ? -100 : std::ilogb(size);
        if (mistake == "log2 cut off" && size > 0) e = int(std::log2(size));
        const bool subnormal = e < 1 - f.bias;
        if (mistake != "no clamp of subnormal values") e = std::max(e, 1 - f.bias);
        float exact = std::ldexp(size, M - e);
        if (mistake == "the 1 in front is subtracted everywhere" && subnormal) exact -= float(one);
        float count = std::nearbyint(exact);
        if (mistake == "ties away") count = std::round(exact);
        if (mistake == "truncation") count = std::trunc(exact);
        if (mistake == "rounds up") count = std::ceil(exact);
        const int steps = int(count), field = mistake == "no bias" ? e : e + f.bias;
        const bool masks_subnormal = mistake == "masked carry of subnormal values too";
        if (mistake == "masked carry" && !subnormal)
            return sign | (field << f.mantissa) | (steps & (one - 1));
        if (masks_subnormal) return sign | (subnormal ? 0 : field << f.mantissa) | (steps & (one - 1));
        if (mistake == "the 1 in front is masked off")
            return sign | (((field << f.mantissa) + steps % one) & 0x7F);
        if (mistake == "the 1 in front is counted twice")
            return (sign | ((field << f.mantissa) + steps)) & 0xFF;
        return (sign | ((field - 1) * one + steps)) & 0xFF;
    };
}

auto exponent(const Words& mistake) {
    return [=](float max, float min) -> float {
        float smallest = 0x1p-9f;
        if (mistake == "2^-6 as minimum") smallest = 0x1p-6f;
        if (mistake == "1 as minimum") smallest = 1;
        if (mistake == "range of another format") smallest = 0x1p-9f / 30;
        float range = std::log2(448 / smallest);
        if (mistake == "ln of 448") range = std::log(448.0f) + 9;
        if (mistake == "ln of 2^-9") range = std::log2(448.0f) - std::log(0x1p-9f);
        float ratio = std::log2(max) - std::log2(min);
        if (mistake == "ln of the ratio") ratio = std::log(max) - std::log(min);
        if (mistake == "ln of the range") range = std::log(448 / smallest);
        if (mistake == "divides max by min") ratio = std::log2(max / min);
        float k = range / ratio;
        if (mistake == "k inverted") k = ratio / range;
        k = mistake == "floor to 1/256" ? std::floor(k * 256) / 256 : std::rint(k * 256) / 256;
        if (mistake == "nearest 1/16") k = std::rint(range / ratio * 16) / 16;
        if (mistake == "floor to 1/16") k = std::floor(range / ratio * 16) / 16;
        if (mistake == "k at least 1") k = std::max(k, 1.0f);
        if (mistake == "not rounded") k = range / ratio;
        k = std::max(k, 1.0f / 16);
        return mistake == "k not limited at 64" ? k : std::min(k, 64.0f);
    };
}

auto expand(const Words& mistake) {
    return [=](float x, float max, float k) {
        if (x == 0) return mistake == "expand of zero is NaN" ? NAN : 0.0f;
        float from = std::log2(std::abs(x)) - std::log2(max);
        if (mistake == "expand not relative to max") from = std::log2(std::abs(x));
        if (mistake == "expand divides x by max") from = std::log2(std::abs(x) / max);
        const float power = std::exp2(from * (mistake == "expand to the power 1 / k" ? 1 / k : k));
        const float y = mistake == "expand to 1" ? power : 448 * power;
        return mistake == "expand loses the sign" ? y : std::copysign(y, x);
    };
}

auto contract(const Words& mistake) {
    return [=](float y, float max, float k) {
        if (y == 0 || mistake == "contract is empty") return 0.0f;
        float exponent = 1 / k;
        if (mistake == "contract to the power k") exponent = k;
        if (mistake == "contract to the power 2 / k") exponent = 2 / k;
        if (mistake == "contract to the power 1 / 2k") exponent = 1 / (2 * k);
        const float root = std::exp2(std::log2(std::abs(y) / 448) * exponent / 2);
        float x = max * root * root;
        if (mistake == "contract underflows") x = max * std::exp2(std::log2(std::abs(y) / 448) * exponent);
        if (mistake == "contract to 1") x = root * root;
        return mistake == "contract loses the sign" ? x : std::copysign(x, y);
    };
}

// Loads moment i.
float load(const Words& mistake, const Moment& from, int i) {
    const float y = given::decode(from.codes[i]);
    return mistake == "no expansion" ? y / 448 * *from.max : given::contract(y, *from.max, *from.k);
}

// Stores a moment group x.
void store(const Words& mistake, const Moment& to, const Floats& x) {
    const float old_max = *to.max, old_k = *to.k;
    float max = 0, min = INFINITY;
    for (float value : x) {
        max = std::max(max, mistake == "signed max" ? value : std::abs(value));
        if (value != 0) min = std::min(min, mistake == "signed min" ? value : std::abs(value));
        else if (mistake == "zeros count in min") min = 0;
    }
    if (mistake == "min begins with 0") min = 0;
    *to.max = max;
    *to.k = 1;
    const bool linear = mistake == "no expansion" || mistake == "stores without expansion";
    if (max != 0 && !linear) *to.k = given::expansion_exponent(max, min);
    const bool outdated = mistake == "codes with the old max and k";
    for (size_t i = 0; i < x.size(); i++)
        to.codes[i] =
            given::encode(given::expand(x[i], outdated ? old_max : *to.max, outdated ? old_k : *to.k));
}

auto adamw(const Words& mistake) {
    return [=](Step s, int n, const float* g, float* w, Moment m, Moment v) {
        Floats new_m(n), new_v(n);
        for (int i = 0; i < n; i++) {
            float gradient = g[i];
            if (mistake == "decay coupled into g") gradient += s.decay * w[i];
            if (mistake == "betas exchanged" && i == 0) std::swap(s.beta1, s.beta2);
            const float square = mistake == "g not squared" ? gradient : gradient * gradient;
            new_m[i] = s.beta1 * load(mistake, m, i) + (mistake == "all of g" ? 1 : 1 - s.beta1) * gradient;
            new_v[i] = s.beta2 * load(mistake, v, i) + (1 - s.beta2) * square;
        }
        store(mistake, m, new_m);
        store(mistake, v, new_v);
        if (mistake == "v with max and k of m") {
            *v.max = *m.max;
            *v.k = *m.k;
            for (int i = 0; i < n; i++) v.codes[i] = given::encode(given::expand(new_v[i], *m.max, *m.k));
        }
        if (mistake == "bias1 and bias2 exchanged") std::swap(s.bias1, s.bias2);
        if (mistake == "no bias correction") s.bias1 = s.bias2 = 1;
        for (int i = 0; i < n; i++) {
            if (mistake == "moments quantized first") {
                new_m[i] = load(mistake, m, i);
                new_v[i] = load(mistake, v, i);
            }
            float divisor = std::sqrt(new_v[i] / s.bias2) + s.eps;
            if (mistake == "bias2 outside the root") divisor = std::sqrt(new_v[i]) / s.bias2 + s.eps;
            if (mistake == "eps inside the root") divisor = std::sqrt(new_v[i] / s.bias2 + s.eps);
            if (mistake == "no root") divisor = new_v[i] / s.bias2 + s.eps;
            if (mistake == "eps before the bias correction")
                divisor = (std::sqrt(new_v[i]) + s.eps) / std::sqrt(s.bias2);
            float change = s.lr * (new_m[i] / s.bias1 / divisor);
            if (mistake == "no learning rate") change = new_m[i] / s.bias1 / divisor;
            if (mistake == "decays the moved weight") w[i] -= change;
            if (mistake == "decays the moved weight") change = 0;
            if (mistake == "decay without learning rate") change += s.decay * w[i];
            else if (mistake != "no decay" && mistake != "decay coupled into g")
                change += s.lr * s.decay * w[i];
            w[i] -= mistake == "adds the update" ? -change : change;
        }
    };
}

using given::product, given::quantized, given::quantized_e5m2, given::transposed;

auto gemm(const Words& mistake) {
    return [=](const Fp8Matrix& a, const Fp8Matrix& b) {
        Matrix c{a.rows, b.rows, {}};
        float scale = a.scale * b.scale;
        if (mistake == "no scales") scale = 1;
        if (mistake == "scale of a") scale = a.scale;
        if (mistake == "scale of b") scale = b.scale;
        const Fp8 format_of_a = mistake == "all codes as E4M3" ? E4M3 : a.format;
        for (int i = 0; i < a.rows; i++)
            for (int j = 0; j < b.rows; j++) {
                float sum = 0;
                for (int k = 0; k < std::min(a.cols, b.cols); k++)
                    sum += given::decode(format_of_a, a.codes[i * a.cols + k]) *
                           given::decode(b.format, b.codes[j * b.cols + k]);
                c.values.push_back(scale * sum);
            }
        return c;
    };
}

// Exercise 8, as it is meant to be solved.
auto linear_of_codes(const Words& mistake) {
    return [=](auto& x, auto& w, auto& g, auto& y, auto& dx, auto& dw) {
        const auto multiply = gemm("");
        const Fp8Matrix x8 = given::quantize(E4M3, x), w8 = given::quantize(E4M3, w),
                        g8 = given::quantize(E5M2, g);
        y = multiply(x8, w8);
        dx = multiply(g8, mistake == "w as it is in dgrad" ? w8 : transposed(w8));
        dw = multiply(transposed(g8), mistake == "x as it is in wgrad" ? x8 : transposed(x8));
        if (mistake == "y quantized") y = quantized(y);
        if (mistake == "dx quantized") dx = quantized(dx);
        if (mistake == "dw quantized") dw = quantized(dw);
    };
}

// The same with decoded values. In this way more mistakes can be made.
auto linear(const Words& mistake) {
    return [=](auto& x, auto& w, auto& g, auto& y, auto& dx, auto& dw) {
        Matrix x8 = quantized(x), w8 = quantized(w), g8 = quantized_e5m2(g), x_wgrad = x8, g_wgrad = g8,
               w_dgrad;
        if (mistake == "x quantized in fprop only") x_wgrad = x;
        if (mistake == "g quantized in dgrad only") g_wgrad = g;
        if (mistake == "g in E4M3") g8 = g_wgrad = quantized(g);
        if (mistake == "w unquantized") w8 = w;
        if (mistake == "all in E5M2") {
            x8 = x_wgrad = quantized_e5m2(x);
            w8 = quantized_e5m2(w);
        }
        if (mistake == "nothing quantized") {
            x8 = x_wgrad = x;
            w8 = w;
            g8 = g_wgrad = g;
        }
        if (mistake == "blocks") {
            x8 = quantized(x, 1, 128);
            w8 = quantized(w, 128, 128);
        }
        w_dgrad = mistake == "w unquantized in dgrad" ? w : w8;
        y = product(x8, transposed(w8));
        dx = product(g8, w_dgrad);
        dw = product(transposed(g_wgrad), x_wgrad);
        if (mistake == "dw transposed") dw = product(transposed(x_wgrad), g_wgrad);
    };
}

auto linear_in_blocks(const Words& mistake) {
    return [=](auto& x, auto& w, auto& g, auto& y, auto& dx, auto& dw) {
        auto along_columns = [](const Matrix& m) { return transposed(quantized(transposed(m), 1, 128)); };
        Matrix x8 = quantized(x, 1, 128), w8 = quantized(w, 128, 128), g8 = quantized(g, 1, 128);
        Matrix x_wgrad = along_columns(x), g_wgrad = along_columns(g);
        if (mistake == "wgrad quantizes quantized values again") {
            x_wgrad = along_columns(x8);
            g_wgrad = along_columns(g8);
        }
        if (mistake == "g as in exercise 8") g8 = g_wgrad = quantized_e5m2(g);
        if (mistake == "all in 128x128") x8 = x_wgrad = quantized(x, 128, 128);
        if (mistake == "all in 128x128") g8 = g_wgrad = quantized(g, 128, 128);
        if (mistake == "x stays transposed in wgrad") x_wgrad = quantized(transposed(x), 1, 128);
        if (mistake == "w in 1x128") w8 = quantized(w, 1, 128);
        const bool both = mistake == "wgrad's blocks along features";
        if (both || mistake == "wgrad's x along features") x_wgrad = x8;
        if (both || mistake == "wgrad's g along features") g_wgrad = g8;
        if (mistake == "wgrad unquantized") {
            x_wgrad = x;
            g_wgrad = g;
        }
        if (mistake == "one scale for a tensor") {
            x8 = quantized(x);
            w8 = quantized(w);
        }
        y = mistake == "no transposes" ? product(x8, w8) : product(x8, transposed(w8));
        dx = product(g8, w8);
        dw = product(transposed(g_wgrad), x_wgrad);
        if (mistake == "y quantized") y = quantized(y, 1, 128);
    };
}

auto norm_backward(const Words& mistake) {
    return [=](int N, int C, Bytes codes, Vector scales, Vector w, Vector dy, float* dx, float* dw) {
        if (mistake != "adds to dweight") std::fill_n(dw, C, 0.0f);
        for (int first = 0; first < N * C; first += C) {
            Floats x(C), d(C);
            float square = 0, term = 0;
            for (int c = 0; c < C; c++) {
                float scale = scales[(first + c) / 16];
                if (mistake == "no scale") scale = 1;
                if (mistake == "scales of the first token") scale = scales[c / 16];
                x[c] = given::decode(codes[first + c]) * scale;
                d[c] = mistake == "no weight" ? dy[first + c] : dy[first + c] * w[c];
                square += x[c] * x[c];
                term += d[c] * x[c];
            }
            if (mistake != "sum in the root") square /= float(C);
            const float r = 1 / std::sqrt(square + (mistake == "no eps" ? 0 : 1e-5f));
            if (mistake != "sum for mean") term /= float(C);
            if (mistake == "no mean term") term = 0;
            if (mistake == "mean term added") term = -term;
            const float cube = mistake == "r squared" ? r * r : r * r * r;
            for (int c = 0; c < C; c++) {
                dx[first + c] = r * d[c] - x[c] * cube * term;
                const float part = dy[first + c] * x[c] * r;
                if (mistake == "the last token only") dw[c] = part;
                else dw[c] += mistake == "weight in dweight" ? part * w[c] : part;
            }
        }
    };
}

auto swiglu_backward(const Words& mistake) {
    return [=](int N, int F, Bytes codes, Vector scales, Vector dact, float* dx) {
        for (int i = 0; i < N * F; i++) {
            int g = i / F * 2 * F + i % F, u = g + F;  // places of gate and up
            if (mistake == "rows of F values") {
                g = i;
                u = g + F;
            }
            if (mistake == "gate and up alternate") {
                g = 2 * i;
                u = g + 1;
            }
            float s_gate = scales[g / 16], s_up = scales[u / 16];
            if (mistake == "no scale") s_gate = s_up = 1;
            if (mistake == "scales of gate for up") s_up = s_gate;
            if (mistake == "rows of F / 16 scales") {
                s_gate = scales[i / 16];
                s_up = scales[(i + F) / 16];
            }
            const float gate = given::decode(codes[g]) * s_gate, up = given::decode(codes[u]) * s_up;
            const float s = 1 / (1 + std::exp(-gate));
            float derivative = s + gate * s * (1 - s);
            if (mistake == "derivative of sigmoid") derivative = s * (1 - s);
            if (mistake == "silu for its derivative") derivative = gate * s;
            const float dgate = dact[i] * derivative * (mistake == "no up" ? 1 : up);
            const float dup = dact[i] * gate * (mistake == "no silu" ? 1 : s);
            const bool adds = mistake == "adds to dgate_up", swaps = mistake == "swapped";
            dx[g] = (adds ? dx[g] : 0) + (swaps ? dup : dgate);
            dx[u] = (adds ? dx[u] : 0) + (swaps ? dgate : dup);
        }
    };
}

int choose(const Words& mistake) {
    judge::Choice choices[6] = {{&E4M3, false}, {&E5M2, false}, {&E4M3, false},
                                {&E4M3, true},  {&E4M3, true},  {&E5M2, false}};
    if (mistake == "groups for A") choices[0].groups = true;
    if (mistake == "E4M3 for B") choices[1].format = &E4M3;
    if (mistake == "E5M2 for C") choices[2].format = &E5M2;
    if (mistake == "one scale for D") choices[3].groups = false;
    if (mistake == "E5M2 for E") choices[4] = {&E5M2, false};
    if (mistake == "groups for F") choices[5] = {&E4M3, true};
    if (mistake == "no format for F") choices[5].format = nullptr;
    return judge::choose(choices);
}

int saved(const Words& mistake) {
    using judge::OperandIn, judge::SavedAs;
    judge::Use uses[7] = {{SavedAs::GROUPS, OperandIn::NO}, {SavedAs::NO, OperandIn::E4M3},
                          {SavedAs::BF16, OperandIn::NO},   {SavedAs::BF16, OperandIn::E4M3},
                          {SavedAs::GROUPS, OperandIn::NO}, {SavedAs::NO, OperandIn::E4M3},
                          {SavedAs::NO, OperandIn::E5M2}};
    if (mistake == "norm outputs saved") uses[1].saved = SavedAs::GROUPS;
    if (mistake == "gate and up are operands") uses[4].operand = OperandIn::E4M3;
    if (mistake == "gradients in E4M3") uses[6].operand = OperandIn::E4M3;
    if (mistake == "A is missing") uses[0].saved = SavedAs::UNKNOWN;
    return judge::saved(uses);
}

int judge_linear(const Words& mistake) {
    const char* const OF_CODES[] = {"y quantized", "dx quantized", "dw quantized", "w as it is in dgrad",
                                    "x as it is in wgrad"};
    const bool of_codes = std::any_of(std::begin(OF_CODES), std::end(OF_CODES),
                                      [&](const char* one) { return mistake == one; });
    if (mistake.empty() || of_codes) return judge::linear(gemm(mistake), linear_of_codes(mistake));
    return judge::linear(gemm(mistake), linear(mistake));
}

int judged(int exercise, const Words& mistake) {
    switch (exercise) {
        case 1: return judge::decode(decode(mistake));
        case 2: return judge::quantize_tensor(quantize_tensor(mistake));
        case 3: return judge::quantize_to_groups(quantize_to_groups(mistake));
        case 4: return judge::amax(amax(mistake));
        case 5: return judge::encode(encode(mistake));
        case 6: return judge::expansion(exponent(mistake), expand(mistake), contract(mistake));
        case 7: return judge::adamw(adamw(mistake));
        case 8: return judge_linear(mistake);
        case 9: return judge::linear_in_blocks(linear_in_blocks(mistake));
        case 10: return judge::norm_backward(norm_backward(mistake));
        case 11: return judge::swiglu_backward(swiglu_backward(mistake));
        case 15: return choose(mistake);
        case 16: return saved(mistake);
        default: return judge::adamw(adamw(mistake), exercise);
    }
}

TEST_CASE("exercises: an empty body is not computed yet" * doctest::skip(exercises_are_solved())) {
    auto is_empty = [](const std::function<int()>& judge) {
        says("nothing is computed yet: write the body", judge);
    };
    is_empty([] { return judge::decode(empty::decode); });
    is_empty([] { return judge::quantize_tensor(empty::quantize_tensor); });
    is_empty([] { return judge::quantize_to_groups(empty::quantize_to_groups); });
    is_empty([] { return judge::amax(empty::amax); });
    is_empty([] { return judge::encode(empty::encode); });
    is_empty([] { return judge::expansion(empty::expansion_exponent, empty::expand, empty::contract); });
    is_empty([] { return judge::adamw(empty::adamw); });
    is_empty([] { return judge::linear(empty::gemm, empty::linear); });
    is_empty([] { return judge::linear_in_blocks(empty::blocks::linear); });
    is_empty([] { return judge::norm_backward(empty::norm_backward); });
    is_empty([] { return judge::swiglu_backward(empty::swiglu_backward); });
    says("nothing is computed yet", [] { return judge::choose(empty::CHOICES); });
    says("nothing is computed yet", [] { return judge::saved(empty::USES); });
}

TEST_CASE("exercises: a solution passes") {
    for (int exercise : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15, 16, 17})
        says("exercise " + std::to_string(exercise) + ": passed, ", [=] { return judged(exercise, ""); });
}

TEST_CASE("exercises: what a header asks is answered when the exercise is solved") {
    const std::vector<std::pair<int, const char*>> answers = {
        {1, "E5M2 has infinity, 0x7C and 0xFC"},
        {3, "made with the rounded scale"},
        {4, "Neither keeps it"},
        {5, "2^(e - M) apart"},
        {6, "2.680, 5.359 and 1"},
        {7, "before they are quantized again"},
        {8, "y sums over in, dx over out, dw over tokens"},
        {9, "x and g are quantized twice"},
        {10, "r d - r^3 x mean(d x)"},
        {11, "s (1 + a (1 - s))"},
        {15, "E5M2 has the range for F"},
        {16, "multiplies each finished sum by the scale once"}};
    for (const auto& [exercise, answer] : answers) {
        CAPTURE(exercise);
        std::ostringstream out;
        std::streambuf* const before = std::cout.rdbuf(out.rdbuf());
        const int code = judged(exercise, "");
        std::cout.rdbuf(before);
        CHECK(code == 0);
        CHECK_MESSAGE(contains(out.str(), answer), out.str());
    }
    CHECK(given::expansion_exponent(100, 1) == doctest::Approx(2.680).epsilon(2e-4));
    CHECK(given::expansion_exponent(10, 1) == doctest::Approx(5.359).epsilon(2e-4));
    CHECK(given::expansion_exponent(229376, 1) == 1);
}

TEST_CASE("exercises: a function that leaves the memory is stopped with a sentence") {
    const Folder folder;
    const std::string output = folder / "out";
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (!freopen(output.c_str(), "w", stdout)) _exit(3);
        judge::decode([](const Fp8&, uint8_t) {
            // No memory is here, and the sanitizers do not check such a load, as they do that of a null pointer.
            volatile int* const nowhere = reinterpret_cast<int*>(4096);
            return float(*nowhere);
        });
        _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 1));
    CHECK(contains(read_file(output), "reads or writes far outside an array"));
}

// A step of exercise 12 with a mistake in the order or in what is used.
double train_step(const Words& mistake, SmallModel& m, int t) {
    const Groups x = given::groups(m.x, quantize_to_groups(""));
    const Matrix normed = mistake == "norm is left out" ? m.x : given::norm_forward(x, m.norm);
    Matrix h, y, dact, dnormed, ddown, dgate_up, unused_dx, unused_dw, g;
    const Matrix zeros_64{64, 64, Floats(64 * 64)}, zeros_32{64, 32, Floats(64 * 32)};
    linear("")(normed, m.gate_up.value, zeros_64, h, unused_dx, unused_dw);
    const Groups gate_up = given::groups(h, quantize_to_groups(""));
    const Matrix act = given::swiglu_forward(gate_up);
    linear("")(act, m.down.value, zeros_32, y, unused_dx, unused_dw);
    const double loss = given::loss(y, m.target, g);
    linear("")(act, m.down.value, g, y, dact, ddown);
    const bool early = mistake == "down is updated before backward reads it";
    if (early) {
        given::update(m.down, ddown.values, t, adamw(""));
        linear("")(act, m.down.value, g, y, dact, unused_dw);
    }
    Matrix dh{64, 64, Floats(64 * 64)};
    swiglu_backward("")(64, 32, gate_up.codes.data(), gate_up.scales.data(), dact.values.data(),
                        dh.values.data());
    linear("")(normed, m.gate_up.value, dh, y, dnormed, dgate_up);
    Floats dx(64 * 32), dnorm(32);
    norm_backward("")(64, 32, x.codes.data(), x.scales.data(), m.norm.value.values.data(),
                      dnormed.values.data(), dx.data(), dnorm.data());
    if (mistake != "norm is not updated") given::update(m.norm, dnorm, t, adamw(""));
    given::update(m.gate_up, dgate_up.values, mistake == "t is always 1" ? 1 : t, adamw(""));
    if (mistake != "down is not updated" && !early) given::update(m.down, ddown.values, t, adamw(""));
    return loss;
}

TEST_CASE("exercises: the capstone passes with a right step and not with a wrong one") {
    auto trains = [](const char* sentence, const Words& mistake) {
        says(sentence, [=] {
            return judge::training([=](SmallModel& m, int t) { return train_step(mistake, m, t); });
        });
    };
    trains("exercise 12: passed, ", "");
    const std::string differ = "the losses of the first 30 steps differ. ";
    const std::string forward = differ + "That of step 1 agrees: forward is right. ";
    trains((forward + "In step 1 m.norm was not updated, or its gradient was zero. In step 1 the gradient is "
                      "right of: m.gate_up, m.down.")
               .c_str(),
           "norm is not updated");
    trains((forward + "In step 1 m.down was not updated, or its gradient was zero. In step 1 the gradient is "
                      "right of: m.norm, m.gate_up.")
               .c_str(),
           "down is not updated");
    trains((forward +
            "In step 1 the gradient is right of: m.norm, m.gate_up, m.down. So look at what update is given")
               .c_str(),
           "t is always 1");
    trains(
        (forward +
         "In step 1 the gradient is wrong of: m.norm, m.gate_up. In step 1 the gradient is right of: m.down.")
            .c_str(),
        "down is updated before backward reads it");
    trains((differ + "That of step 1 differs already: look at forward.").c_str(), "norm is left out");
    trains("m.gate_up is the first: look at what is given", "down is updated before backward reads it");
    trains("m.norm: is update called for it", "norm is not updated");
    says("nothing is computed yet", [] { return judge::training([](SmallModel&, int) { return 0.0; }); });
}

TEST_CASE("exercises: the hint points at the cause of a typical mistake") {
    for (const auto& [exercise, mistake, hint] : MISTAKES) {
        CAPTURE(exercise);
        CAPTURE(mistake);
        says(hint, [&, &number = exercise, &words = mistake] { return judged(number, words); });
    }
}

// What a judge prints.
std::string output_of(const std::function<int()>& judge) {
    std::ostringstream out;
    std::streambuf* const before = std::cout.rdbuf(out.rdbuf());
    judge();
    std::cout.rdbuf(before);
    return out.str();
}

TEST_CASE("exercises: the judge shows the inputs of the first wrong value") {
    const std::vector<std::tuple<int, const char*, const char*>> inputs = {
        {1, "no sign", "code 0x80"},
        {2, "divides by s", "x["},
        {3, "scale cut off", "columns 0..15 of this row, the largest |x| is "},
        {4, "NaN lost", "x[16..31], x[20] = nan"},
        {5, "ties away", "x = "},
        {6, "expand to 1", "x = "},
        {6, "contract to 1", "y = "},
        {7, "no decay", "g = "},
        {7, "zeros count in min", "128 values after the update, "},
        {8, "y quantized", "row 0 of x = "},
        {8, "no scales", "row 0 of a in E5M2: 0x"},
        {10, "no eps", "x(3, 0) = "},
        {11, "no up", "token 0, feature 0: gate = "},
        {17, "moments quantized first", "g = "}};
    for (const auto& [exercise, mistake, input] : inputs) {
        const std::string output =
            output_of([&, &number = exercise, &words = mistake] { return judged(number, words); });
        CHECK_MESSAGE(contains(output, concat("\n  input     ", input)), output);
    }
}

// 17-find-the-bugs.cpp is given with two bugs, and with either of them alone it is wrong, too.
TEST_CASE("exercises: the judge finds both bugs of 17" * doctest::skip(exercises_are_solved())) {
    says("values differ", [] { return judge::adamw(empty::bugs::adamw, 17); });
    says("Zeros do not count", [] { return judged(17, "zeros count in min"); });
    says("Update the weight before", [] { return judged(17, "moments quantized first"); });
    says("exercise 17: one of the two bugs is mended. ", [] { return judged(17, "zeros count in min"); });
    says("exercise 17: one of the two bugs is mended. ",
         [] { return judged(17, "moments quantized first"); });
    const std::string at_first = output_of([] { return judge::adamw(empty::bugs::adamw, 17); });
    CHECK_FALSE(contains(at_first, "is mended"));
}

TEST_CASE("exercises: the first run shows what differs and how to get a hint") {
    judge::hint_wanted = false;
    std::ostringstream out;
    std::streambuf* const before = std::cout.rdbuf(out.rdbuf());
    judged(3, "signed amax");
    judged(7, "no decay");
    judged(15, "groups for A");
    std::cout.rdbuf(before);
    CHECK_MESSAGE(contains(out.str(), "  expected  "), out.str());
    CHECK(contains(out.str(), "A hint: make exercise N=3 HINT=1"));
    CHECK(contains(out.str(),
                   "). Right: max of m, k of m, code of m (for your max and k), max of v, k of v, code of v "
                   "(for your max and k). One of them:"));
    CHECK(
        contains(out.str(), "lr = 0.01, beta1 = 0.9, beta2 = 0.95, eps = 0.01, decay = 0.1, bias1 = 0.271"));
    CHECK(contains(out.str(), "A hint: make exercise N=15 HINT=1"));
    CHECK_FALSE(contains(out.str(), "take |x|"));
    CHECK_FALSE(contains(out.str(), "Groups win little here"));
}

}  // namespace
}  // namespace exercises
