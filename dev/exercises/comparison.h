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
#include <map>
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
        Result& result = results_[name];
        for (size_t i = 0; i < expected.size(); i++) {
            const double y = value(expected[i]), mine = value(got[i]);
            count_++;
            if (mine != 0 && !std::isnan(mine) && !untouched(got[i])) result.written = true;
            const bool right = agree(expected[i], got[i], tolerance);
            if (!right) result.wrong++;
            for (const Hint& h : hints)
                if (!h.values.empty())
                    result.predicted(h.text, fits(h, i, got[i], tolerance, relative), right);
            if (right) continue;
            for (const Hint& h : hints)
                if (h.values.empty()) result.has_in_common(h.text, true);
            if (sizeof(T) == 1 && std::abs(got[i] - expected[i]) == 1)
                result.has_in_common("Every wrong code is one off: round to the nearest, not up or down.",
                                     false);
            if (mine * y != 0 && std::isfinite(mine / y))
                result.has_in_common(
                    text("Every wrong value is off by the factor ", std::setprecision(3), mine / y,
                         ": look at the scale, at a mean, or at the exponent's bias."),
                    false);
            const std::string index = expected.size() > 1 ? place(i) : "";
            show(name, index + of, input(i), shown(expected[i]), shown(got[i]));
        }
        for (size_t i = expected.size(); i < got.size(); i++) {
            if (untouched(got[i])) continue;
            result.past_the_end = true;
            show(name, text(" ", i, of), "", "nothing, for it ends before", shown(got[i]));
        }
    }

    // Whether all values of a result are right that were compared until now; false if there were none.
    bool is_right(const std::string& name) const {
        const auto found = results_.find(name);
        return found != results_.end() && found->second.wrong == 0;
    }

    // answer: to what the exercise asks; it is printed when the exercise is solved. May be empty.
    int finish(const std::string& answer = "") const {
        const std::string failure = std::exchange(judge::failure, "");
        size_t wrong = 0;
        bool written = false, right = true;
        for (const auto& [name, result] : results_) {
            wrong += result.wrong;
            written = written || result.written;
            right = right && result.wrong == 0 && !result.past_the_end;
        }
        std::cout << "exercise " << number_ << ": ";
        if (!failure.empty()) std::cout << failure << "\n";
        else if (right)
            std::cout << "passed, " << count_ << " values agree with the reference.\n"
                      << (answer.empty() ? "" : "  " + answer + "\n");
        else if (!written) std::cout << "nothing is computed yet: write the body of the function.\n";
        else {
            const Result& first = results_.at(first_);
            std::cout << progress << wrong << " of " << count_ << " values differ. The first:" << shown_;
            if (first.past_the_end) std::cout << "\n  You write past the end of " << first_ << ".\n";
            else if (!first.written) std::cout << "\n  This is not computed yet: " << first_ << ".\n";
            else std::cout << hint_line(number_, hint(first));
        }
        return !right || !failure.empty();
    }

private:
    struct Explanation {
        std::string text;
        bool predicts;           // it says each value, not only what the wrong ones have in common
        bool of_input;           // what they have in common is a property of their inputs
        bool everywhere = true;  // it predicts the right values, too
        bool of_shown = false;   // it predicts the first wrong value, which is shown
        size_t wrong = 0;        // so many wrong values
    };
    struct Result {
        bool written = false, past_the_end = false;
        size_t wrong = 0;
        std::vector<Explanation> explanations = {};

        void predicted(const std::string& text, bool so, bool right) {
            Explanation* e = find(text);
            if (!e) e = &explanations.emplace_back(Explanation{text, true, false});
            if (!so) e->everywhere = false;
            if (!so || right) return;
            e->wrong++;
            if (wrong == 1) e->of_shown = true;
        }
        // What the first wrong value does not have is not common to all.
        void has_in_common(const std::string& text, bool of_input) {
            Explanation* e = find(text);
            if (!e && wrong == 1 && !text.empty())
                e = &explanations.emplace_back(Explanation{text, false, of_input});
            if (e) e->wrong++;
        }
        Explanation* find(const std::string& text) {
            for (Explanation& e : explanations)
                if (e.text == text) return &e;
            return nullptr;
        }
    };

    double value(float x) const { return x; }
    double value(uint8_t code) const { return reference::decode(format, code); }
    std::string shown(float x) const { return untouched(x) ? "undefined, as before the call" : text(x); }
    std::string shown(uint8_t code) const { return hex(code) + " = " + text(value(code)); }

    template <class T> Hint added_to(const std::string& name, const std::vector<T>& expected) {
        Hint hint{"This is undefined before the call: set " + name + " to zero before you add to it."};
        for (T v : expected) hint.values.push_back(float(v) + UNDEFINED);
        return hint;
    }
    void show(const std::string& name, const std::string& which, const std::string& from,
              const std::string& expected, const std::string& mine) {
        if (!first_.empty()) return;
        first_ = name;
        shown_ = "\n  value     " + name + which;
        if (!from.empty()) shown_ += "\n  input     " + from;
        shown_ += "\n  expected  " + expected + "\n  yours     " + mine;
    }

    // A mistake that makes all the reader's values is certain. Then comes what the wrong values have in
    // common. A mistake that makes only the wrong values may be chance: where a value is extreme, many
    // mistakes look alike.
    std::string hint(const Result& result) const {
        std::string perhaps, partly;
        for (const Explanation& e : result.explanations) {
            const bool all = e.wrong == result.wrong;
            if (e.predicts && all && e.everywhere) return e.text;
        }
        for (const Explanation& e : result.explanations) {
            const bool all = e.wrong == result.wrong;
            if (!e.predicts && all) return e.text;
            if (e.predicts && all && perhaps.empty()) perhaps = "Perhaps: " + e.text;
            if (e.of_input && partly.empty())
                partly = "Not all wrong values are alike. Of the first: " + e.text;
        }
        if (!perhaps.empty()) return perhaps;
        if (!partly.empty()) return partly;
        // Where there are several mistakes, none makes all wrong values: the value that is shown tells of
        // one.
        const Explanation* shown = nullptr;
        for (const Explanation& e : result.explanations)
            if (e.of_shown && (!shown || e.wrong > shown->wrong)) shown = &e;
        if (shown)
            return "Perhaps there are several mistakes. This one makes the value above: " + shown->text;
        return "No typical mistake makes these values. Compute the first wrong one of " + first_ +
               " on paper, with what stands above the function, and print the steps of your own.";
    }

    const CrashMessage crash_message_;
    int number_;
    std::mt19937 random_{1};
    size_t count_ = 0;
    std::string first_, shown_;  // the result that has the first wrong value, and what is printed of this
    std::map<std::string, Result> results_;
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
    return each(amaxes(x, rows), [](float amax) { return reference::scale_of(E4M3_1x16, amax); });
}

inline constexpr const char* SIGNED = "The largest magnitude may be that of a negative value: take |x|.";

}  // namespace judge
