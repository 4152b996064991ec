// random.h - fresh random inputs for the tests of numerics.
//
// Every run of the tests draws new numbers, so that a property is tried on more than one set of them. A
// failure prints the seed; COAT_SEED=<seed> repeats it. COAT_QUICK=1 asks for smaller counts, for runs under
// sanitizers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace coat::test {

inline bool quick() {
    static const bool wanted = std::getenv("COAT_QUICK") != nullptr;
    return wanted;
}
inline int64_t count(int64_t full, int64_t under_sanitizers) { return quick() ? under_sanitizers : full; }

inline uint64_t run_seed() {
    static const uint64_t seed = [] {
        const char* given = std::getenv("COAT_SEED");
        return given ? std::strtoull(given, nullptr, 10) : uint64_t(std::random_device{}());
    }();
    return seed;
}

// splitmix64, with the distributions that tensors of a training run have.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t bits() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
    double uniform() { return static_cast<double>((bits() >> 11) + 1) * 0x1p-53; }  // (0, 1]
    double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }
    double sign() { return bits() & 1 ? 1.0 : -1.0; }

    template <class Real>
    std::vector<Real> normals(int64_t n, double std = 1) {
        std::vector<Real> x(static_cast<size_t>(n));
        for (Real& v : x) v = static_cast<Real>(std * normal());
        return x;
    }

private:
    uint64_t state_;
};

// A generator for this test case; its seed is in the message of every check that fails in this scope.
#define FRESH_RANDOM(rng)                            \
    coat::test::Random rng(coat::test::run_seed()); \
    INFO("repeat with COAT_SEED=", coat::test::run_seed())

// A scale that is rounded up to BF16 grows by up to 2^-7, and so may the largest value: beyond this it would
// pass FP32's range.
inline constexpr double HUGE_MAGNITUDE = 0x1p128 * (1 - 0x1p-7);

// Kinds of data: one row each, so that a property is checked on all of them.
struct Distribution {
    std::string name;
    float (*draw)(Random&, int64_t i);
};

inline const std::vector<Distribution>& distributions() {
    static const std::vector<Distribution> table = {
        {"normal", [](Random& r, int64_t) { return float(r.normal()); }},
        {"small normal", [](Random& r, int64_t) { return float(1e-6 * r.normal()); }},
        {"Student t with 2 degrees of freedom",
         [](Random& r, int64_t) { return float(r.normal() / std::sqrt(-std::log(r.uniform()) + 1e-12)); }},
        {"exp of normal", [](Random& r, int64_t) { return float(r.sign() * std::exp(4 * r.normal())); }},
        {"outliers", [](Random& r, int64_t) { return float(r.normal() * (r.below(100) == 0 ? 1e4 : 1.0)); }},
        {"mostly zeros", [](Random& r, int64_t) { return r.below(4) ? 0.0f : float(r.normal()); }},
        {"all zero", [](Random&, int64_t) { return 0.0f; }},
        {"one not zero", [](Random&, int64_t i) { return i == 3 ? -0.7f : 0.0f; }},
        {"equal magnitudes", [](Random& r, int64_t) { return float(0.3 * r.sign()); }},
        {"denormal", [](Random& r, int64_t) { return float(r.sign() * r.uniform() * 0x1p-127); }},
        {"huge", [](Random& r, int64_t) { return float(r.sign() * r.uniform() * HUGE_MAGNITUDE); }},
        {"any magnitude",
         [](Random& r, int64_t) { return float(r.sign() * std::exp2(-149 + 276 * r.uniform())); }},
    };
    return table;
}

inline std::vector<float> sample(const Distribution& d, Random& rng, int64_t n) {
    std::vector<float> x(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; i++) x[static_cast<size_t>(i)] = d.draw(rng, i);
    return x;
}

template <class Real>
double norm(const std::vector<Real>& x) {
    double sum = 0;
    for (Real v : x) sum += double(v) * double(v);
    return std::sqrt(sum);
}

// |a - b| / |b| as vectors; where b is zero, |a|.
template <class A, class B>
double relative_error(const std::vector<A>& a, const std::vector<B>& b) {
    double difference = 0;
    for (size_t i = 0; i < b.size(); i++)
        difference += (double(a[i]) - double(b[i])) * (double(a[i]) - double(b[i]));
    const double size = norm(b);
    return std::sqrt(difference) / (size > 0 ? size : 1);
}

}  // namespace coat::test
