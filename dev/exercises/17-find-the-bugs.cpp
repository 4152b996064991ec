// 17 - Find two bugs (lessons 8 and 9; about 20 minutes)
//
// This is somebody's solution of exercise 7. Nothing crashes and nothing becomes NaN, but it has two bugs.
// (Lesson 9 has a rule by which code 0 of a second moment becomes code 1. That this rule is missing is none
// of the bugs: with equation 4's k no second moment needs it.) Find both by reading, before you run the
// judge, and mend them.
#include <algorithm>
#include <cmath>

#include "judge.h"

// The n values of a moment.
std::vector<float> load(const Moment& moment, int n) {
    std::vector<float> x;
    for (int i = 0; i < n; i++)
        x.push_back(given::contract(given::decode(moment.codes[i]), *moment.max, *moment.k));
    return x;
}

void store(const Moment& moment, const std::vector<float>& x) {
    float max = 0, min = INFINITY;
    for (float value : x) {
        max = std::max(max, std::fabs(value));
        min = std::min(min, std::fabs(value));
    }
    *moment.max = max;
    *moment.k = max == 0 ? 1 : given::expansion_exponent(max, min);
    for (size_t i = 0; i < x.size(); i++)
        moment.codes[i] = given::encode(given::expand(x[i], *moment.max, *moment.k));
}

void adamw(const Step& s, int n, const float* g, float* w, Moment stored_m, Moment stored_v) {
    std::vector<float> m = load(stored_m, n), v = load(stored_v, n);
    for (int i = 0; i < n; i++) {
        m[i] = s.beta1 * m[i] + (1 - s.beta1) * g[i];
        v[i] = s.beta2 * v[i] + (1 - s.beta2) * g[i] * g[i];
    }
    store(stored_m, m);
    store(stored_v, v);
    m = load(stored_m, n);
    v = load(stored_v, n);
    for (int i = 0; i < n; i++) {
        const float step = m[i] / s.bias1 / (std::sqrt(v[i] / s.bias2) + s.eps);
        w[i] -= s.lr * (step + s.decay * w[i]);
    }
}

int main() { return judge::adamw(adamw, 17); }
