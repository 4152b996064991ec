// reference/arrays.h - two things that several files of the reference use.
#pragma once
#include <cstdint>
#include <vector>

namespace coat::reference {

// Loops over fewer elements run on one thread: starting the others would take longer.
inline constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 14;

// The transpose (cols, rows) of x (rows, cols), whose rows begin `stride` elements apart.
template <class Real>
std::vector<Real> transposed(const Real* x, int64_t rows, int64_t cols, int64_t stride) {
    std::vector<Real> transpose(rows * cols);
#pragma omp parallel for if (rows * cols > MIN_PARALLEL_ELEMENTS)
    for (int64_t col = 0; col < cols; col++)
        for (int64_t row = 0; row < rows; row++) transpose[col * rows + row] = x[row * stride + col];
    return transpose;
}

}  // namespace coat::reference
