// comparison.h - how a judge finds a wrong value and the hint that fits it: results with guards around them,
// typical mistakes with the values that they make, and Comparison, which collects both for one exercise.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <csignal>
#include <iomanip>
#include <iostream>
#include <random>
#include <sstream>
#include <utility>

#include "judge.h"

namespace judge {

using namespace coat;
using Floats = std::vector<float>;
using Codes = std::vector<uint8_t>;

template <class... Parts> std::string text(const Parts&... parts) {
    std::ostringstream out;
    out.precision(9);
    (out << ... << parts);
    return out.str();
}
// What stands below a wrong value: the reader looks for the cause alone before a hint names it.
inline std::string hint_line(int exercise, const std::string& hint) {
    if (hint_wanted) return "\n  hint      " + hint + "\n";
    return text("\n  Look for the cause. A hint: make exercise N=", exercise, " HINT=1\n");
}
inline std::string hex(int code) { return text("0x", std::hex, std::setw(2), std::setfill('0'), code); }

// What may be wrong. With values, it is a mistake and the results that it makes of the inputs; without, it is
// a property of the input of a wrong value. An empty text is no hint.
struct Hint {
    std::string text;
    Floats values = {};
    double tolerance = 0;  // of values, at least
};
// A property of inputs, with what holds for them
inline Hint where(bool here, const std::string& text) { return {here ? text : ""}; }
inline Hint about(const std::string& special, bool here = true) {
    return where(here && !special.empty(),
                 "This is about " + special +
                     ": the text above the function or the lesson tells what is to be "
                     "done there.");
}

// Results are filled with these before the call, and have GUARDS more of them after their ends. Inputs have
// GUARDS values after their ends that change any result.
inline constexpr uint8_t UNWRITTEN = 0xFF;
inline constexpr float UNDEFINED = 1000;
inline constexpr size_t GUARDS = 128;
inline constexpr float GUARD = 1e9f;
inline constexpr uint8_t GUARD_CODE = 0x7E;

inline Floats undefined(size_t n) { return Floats(n + GUARDS, UNDEFINED); }
inline Codes unwritten(size_t n) { return Codes(n + GUARDS, UNWRITTEN); }
inline bool untouched(float x) { return x == UNDEFINED; }
inline bool untouched(uint8_t code) { return code == UNWRITTEN; }
inline Floats guarded(Floats x, float guard = GUARD) {
    x.resize(x.size() + GUARDS, guard);
    return x;
}
inline Codes guarded(Codes codes) {
    codes.resize(codes.size() + GUARDS, GUARD_CODE);
    return codes;
}

// Codes are equal, those of NaN and of zero with their signs, too. A value that is NaN has no sign.
inline bool agree(float expected, float got, double tolerance) {
    if (expected == 0 && got == 0) return std::signbit(expected) == std::signbit(got);
    if (std::isnan(expected)) return std::isnan(got);
    return got == expected || std::abs(got - expected) <= tolerance;
}

// A mistake makes this of value i. What it makes may be much larger than what is expected, and the reader
// rounds it otherwise; so its own size counts, too.
inline bool fits(const Hint& mistake, size_t i, float got, double tolerance, double relative) {
    const double value = mistake.values[i];
    if (relative > 0) tolerance = std::max(tolerance, std::max(relative, 1e-3) * std::abs(value));
    tolerance = std::max(tolerance, mistake.tolerance);
    const bool near = tolerance > 0 && std::abs(got - value) <= tolerance;
    return near || agree(mistake.values[i], got, tolerance);
}

// While it exists, a function that leaves the program's memory ends the program with a sentence.
class CrashMessage {
public:
    CrashMessage() {
        for (int i : {0, 1}) before_[i] = std::signal(SIGNALS[i], say);
    }
    ~CrashMessage() {
        for (int i : {0, 1}) std::signal(SIGNALS[i], before_[i]);
    }
    CrashMessage(const CrashMessage&) = delete;
    CrashMessage& operator=(const CrashMessage&) = delete;

private:
    static constexpr int SIGNALS[] = {SIGSEGV, SIGABRT};  // of a far address; of memory that is overwritten
    void (*before_[2])(int);

    static void say(int) {
        constexpr char WORDS[] =
            "your function reads or writes far outside an array, and the program was "
            "stopped. Check its indices and the ends of its loops.\n";
        const bool written = write(STDOUT_FILENO, WORDS, sizeof(WORDS) - 1) > 0;
        _exit(written ? 1 : 2);
    }
};

// What is compared of one exercise.
class Comparison {
public:
    Format format = Format::E4M3;  // of codes, which are compared as uint8_t
    std::string special, of;       // about the input of what is compared; may be empty
    std::string progress;          // what is right although values differ; may be empty
    // No result is computed from another: then that with the largest share of wrong values is explained. Else
    // it is the first that is wrong, because the others may follow from it.
    bool independent = false;
    // Says where value i of a result is, as in "dw(0, 1)" or "code 7"
    Function<std::string(size_t)> place = [](size_t i) { return text(" ", i); };
    // Says from which inputs value i is computed; may be empty
    Function<std::string(size_t)> input = [](size_t) { return ""; };

    explicit Comparison(int number) : number_(number) {}

    // Normal values, the same in every run; spread: of the logarithms of their magnitudes
    Floats normal(int n, float spread = 0) {
        std::normal_distribution<float> distribution;
        Floats x(n);
        for (float& v : x) v = distribution(random_) * std::exp(spread * distribution(random_));
        return x;
    }

    // Of a result: its name, the values expected, and the reader's. What the latter have after the expected
    // ones must still be undefined. tolerance: relative to the largest expected magnitude
    template <class T>
    void operator()(const std::string& name, const std::vector<T>& expected, const std::vector<T>& got,
                    std::vector<Hint> hints = {}, double tolerance = 0) {
        double largest = 0;
        for (T v : expected) largest = std::max(largest, std::abs(double(v)));
        const double relative = tolerance;
        tolerance *= largest;
        if (sizeof(T) == sizeof(float)) hints.push_back(added_to(name, expected));
        hints.push_back(about(special));
        Result& result = result_named(name);
        for (size_t i = 0; i < expected.size(); i++) {
            const double y = value(expected[i]), mine = value(got[i]);
            result.count++;
            if (mine != 0 && !std::isnan(mine) && !untouched(got[i])) result.written = true;
            const bool right = agree(expected[i], got[i], tolerance);
            const auto here = [&] {  // what is printed of this value if it is wrong
                const std::string index = expected.size() > 1 ? place(i) : "";
                return described(name + index + of, input(i), shown(expected[i]), shown(got[i]));
            };
            if (!right) result.wrong++;
            if (!right && result.wrong == 1) result.first = here();
            for (const Hint& h : hints)
                if (!h.values.empty())
                    result.predicted(h.text, fits(h, i, got[i], tolerance, relative), right, here);
            for (const Hint& h : hints)
                if (h.values.empty()) result.of_input(h.text, right, here);
            if (right) continue;
            if (sizeof(T) == 1 && std::abs(got[i] - expected[i]) == 1)
                result.of_value("Every wrong code is one off: round to the nearest, not up or down.", here);
            if (mine * y != 0 && std::isfinite(mine / y))
                result.of_value(text("Every wrong value is off by the factor ", std::setprecision(3),
                                     mine / y, ": look at the scale, at a mean, or at the exponent's bias."),
                                here);
        }
        for (size_t i = expected.size(); i < got.size(); i++) {
            if (untouched(got[i]) || result.past_the_end) continue;
            result.past_the_end = true;
            if (!result.wrong)
                result.first =
                    described(name + text(" ", i, of), "", "nothing, for it ends before", shown(got[i]));
        }
    }

    // Whether all values of a result are right that were compared until now; false if there were none.
    bool is_right(const std::string& name) const {
        for (const Result& result : results_)
            if (result.name == name) return result.wrong == 0;
        return false;
    }

    // answer: to what the exercise asks; it is printed when the exercise is solved. May be empty.
    int finish(const std::string& answer = "") const {
        const std::string failure = std::exchange(judge::failure, "");
        size_t wrong = 0, count = 0;
        bool written = false;
        const Result* explained = nullptr;
        for (const Result& result : results_) {
            wrong += result.wrong;
            count += result.count;
            written = written || result.written;
            if (result.right()) continue;
            if (!explained || (independent && result.share() > explained->share())) explained = &result;
        }
        std::cout << "exercise " << number_ << ": ";
        if (!failure.empty()) std::cout << failure << "\n";
        else if (!explained)
            std::cout << "passed, " << count << " values agree with the reference.\n"
                      << (answer.empty() ? "" : "  " + answer + "\n");
        else if (!written) std::cout << "nothing is computed yet: write the body of the function.\n";
        else {
            std::cout << progress << wrong << " of " << count << " values differ" << what_differs() << ".";
            explain(*explained);
        }
        return explained || !failure.empty();
    }

private:
    struct Explanation {
        std::string text;
        bool predicts;      // it says each value, not only what the wrong ones have in common
        bool of_input;      // what they have in common is a property of their inputs
        std::string first;  // what is printed of the first wrong value that it explains
        size_t wrong = 0;   // how many wrong values are as it says
        size_t others = 0;  // how many values are not as it predicts, or have its property and are right

        void counts(const Function<std::string()>& here) {
            wrong++;
            if (wrong == 1) first = here();
        }
    };
    struct Result {
        std::string name;
        bool written = false, past_the_end = false;
        size_t count = 0, wrong = 0;
        std::string first = "";  // what is printed of the first wrong value
        std::vector<Explanation> explanations = {};

        bool right() const { return wrong == 0 && !past_the_end; }
        // Of wrong values
        double share() const { return double(wrong) / double(std::max<size_t>(count, 1)); }
        void predicted(const std::string& text, bool so, bool right, const Function<std::string()>& here) {
            Explanation* e = find(text);
            if (!e) e = &explanations.emplace_back(Explanation{text, true, false, ""});
            if (!so) e->others++;
            if (so && !right) e->counts(here);
        }
        // The input of a value, right or wrong, has a property.
        void of_input(const std::string& text, bool right, const Function<std::string()>& here) {
            if (text.empty()) return;
            Explanation* e = find(text);
            if (!e) e = &explanations.emplace_back(Explanation{text, false, true, ""});
            if (right) e->others++;
            else e->counts(here);
        }
        // A wrong value has a property: it may explain the others, too, if it is the first.
        void of_value(const std::string& text, const Function<std::string()>& here) {
            Explanation* e = find(text);
            if (!e && wrong == 1) e = &explanations.emplace_back(Explanation{text, false, false, ""});
            if (e) e->counts(here);
        }
        // Whether values with this property of their inputs are wrong more than twice as often as the others.
        bool stands_out(const Explanation& e) const {
            const double with = double(e.wrong) / double(std::max<size_t>(e.wrong + e.others, 1));
            const size_t others = count - e.wrong - e.others;
            return with * double(others) > 2 * double(wrong - e.wrong);
        }
        Explanation* find(const std::string& text) {
            for (Explanation& e : explanations)
                if (e.text == text) return &e;
            return nullptr;
        }
    };

    Result& result_named(const std::string& name) {
        for (Result& result : results_)
            if (result.name == name) return result;
        return results_.emplace_back(Result{name});
    }
    // Which results are wrong, if there are several
    std::string what_differs() const {
        std::string right, wrong;
        for (const Result& result : results_) {
            std::string& list = result.right() ? right : wrong;
            list += (list.empty() ? "" : ", ") + result.name;
            if (!result.right()) list += text(" (", result.wrong, " of ", result.count, ")");
        }
        if (results_.size() == 1) return "";
        return ": " + wrong + (right.empty() ? "" : ". Right: " + right);
    }

    double value(float x) const { return x; }
    double value(uint8_t code) const { return reference::decode(format, code); }
    std::string shown(float x) const { return untouched(x) ? "undefined, as before the call" : text(x); }
    std::string shown(uint8_t code) const { return hex(code) + " = " + text(value(code)); }

    template <class T> Hint added_to(const std::string& name, const std::vector<T>& expected) {
        Hint hint{"This is undefined before the call: set " + name + " to zero before you add to it."};
        for (T v : expected) hint.values.push_back(float(v) + UNDEFINED);
        return hint;
    }
    std::string described(const std::string& which, const std::string& from, const std::string& expected,
                          const std::string& mine) const {
        std::string lines = "\n  value     " + which;
        if (!from.empty()) lines += "\n  input     " + from;
        return lines + "\n  expected  " + expected + "\n  yours     " + mine;
    }

    // Prints a wrong value, and with HINT=1 the cause: the mistake whose results are most like the reader's.
    // A mistake that makes all of these is certain. One that makes all wrong values, but also others, may be
    // chance: where a value is extreme, many mistakes look alike. So what wrong values have in common goes
    // before it; of several such properties, that which the fewest right values have. What only a part of the
    // wrong values has in common counts if it is rarer among right values.
    void explain(const Result& result) const {
        const Explanation *mistake = nullptr, *common = nullptr, *input = nullptr;
        for (const Explanation& e : result.explanations) {
            const bool all = e.wrong == result.wrong;
            if (e.predicts && e.wrong && (!mistake || e.others < mistake->others)) mistake = &e;
            const bool rarer = common && common->of_input && e.of_input && e.others < common->others;
            if (!e.predicts && e.wrong && all && (!common || rarer)) common = &e;
            if (e.of_input && result.stands_out(e) && (!input || e.wrong > input->wrong)) input = &e;
        }
        auto say = [&](const Explanation* e, const std::string& before) {
            std::cout << " One of them:" << e->first << hint_line(number_, before + e->text);
        };
        auto many = [&](const Explanation* e) { return e && 4 * e->wrong >= result.wrong; };
        auto share = [&](const Explanation* e) {
            return text(e->wrong, " of the ", result.wrong, " wrong values: ");
        };
        const bool makes_all = mistake && mistake->wrong == result.wrong;
        if (result.wrong && !result.written)
            std::cout << result.first << "\n  This is not computed yet: " << result.name << ".\n";
        else if (makes_all && mistake->others == 0) say(mistake, "");
        else if (result.past_the_end)
            std::cout << result.first << "\n  You write past the end of " << result.name << ".\n";
        else if (common) say(common, "");
        else if (makes_all) say(mistake, "Perhaps: ");
        else if (many(mistake) && (!input || mistake->wrong >= input->wrong))
            say(mistake, "Perhaps there are several mistakes. This one makes " + share(mistake));
        else if (many(input)) say(input, share(input));
        else {
            const char* const nothing =
                "No typical mistake makes these values. Compute the one above on paper, with what stands "
                "above the function, and print the steps of your own.";
            std::cout << " The first:" << result.first << hint_line(number_, nothing);
        }
    }

    const CrashMessage crash_message_;
    int number_;
    std::mt19937 random_{1};
    std::vector<Result> results_;
};

// Of a matrix that is stored row by row
inline Function<std::string(size_t)> row_and_column(size_t cols) {
    return [cols](size_t i) { return text("(", i / cols, ", ", i % cols, ")"); };
}

inline Format format_of(const Fp8& f) { return f.mantissa == 3 ? Format::E4M3 : Format::E5M2; }

template <class T, class F> Floats each(const std::vector<T>& x, F f) {
    Floats y;
    for (T v : x) y.push_back(f(v));
    return y;
}
// The largest magnitudes of groups of 16, row by row. largest: of how many values at x
template <class F> Floats maxima(const Floats& x, int rows, F largest) {
    Floats result;
    const int cols = int(x.size()) / rows;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c += 16)
            result.push_back(largest(&x[r * cols + c], std::min(16, cols - c)));
    return result;
}
inline Floats amaxes(const Floats& x, int rows) { return maxima(x, rows, reference::compute_amax); }
inline float largest_signed(const float* x, int64_t n) {
    float largest = 0;
    for (int64_t i = 0; i < n; i++) largest = std::isnan(x[i]) ? INFINITY : std::max(largest, x[i]);
    return largest;
}
inline Floats scales(const Floats& x, int rows) {
    return each(amaxes(x, rows), [](float amax) { return reference::scale_of(E4M3_PER_1x16, amax); });
}

inline constexpr const char* SIGNED = "The largest magnitude may be that of a negative value: take |x|.";

}  // namespace judge
