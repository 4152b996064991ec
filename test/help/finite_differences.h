// finite_differences.h - gradients by central differences in double.
//
// A central difference with step h = 1e-5 has an error of about h^2 |f'''| / 6 = 1e-10 and of eps |f| / h =
// 1e-11. The tolerance of 1e-7 allows third derivatives of 1000.
#pragma once
#include <functional>

#include "../../reference.h"
#include "random.h"
#include "model.h"

namespace coat::test::finite_differences {

using namespace coat::reference;
using Vector = std::vector<double>;

inline constexpr double STEP = 1e-5, TOLERANCE = 1e-7;

inline double dot(const Vector& a, const Vector& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
    return sum;
}

// Slope of f at x along a direction.
inline double slope(const std::function<double(const Vector&)>& f, const Vector& x, const Vector& direction) {
    Vector ahead = x, behind = x;
    for (size_t i = 0; i < x.size(); i++) ahead[i] += STEP * direction[i], behind[i] -= STEP * direction[i];
    return (f(ahead) - f(behind)) / (2 * STEP);
}

}  // namespace coat::test::finite_differences
