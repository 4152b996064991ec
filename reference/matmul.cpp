// reference/matmul.cpp - the matrix multiplication of the CPU reference. It takes most of the time of a
// step. So it is not the three plain loops, but computes tiles that stay in registers. This file can wait:
// nothing else depends on how it works. The result of an element is the same for any number of threads,
// because one thread adds up all its products, in the order of k.
#include "arrays.h"
#include "operators.h"

namespace coat::reference {

constexpr int64_t MIN_PARALLEL_PRODUCTS = 1 << 16;  // GEMMs with fewer products run on one thread

// Copies a matrix (rows, depth) to panels. A panel has `width` rows of the matrix, transposed: (depth,
// width). The last panel has zeros where the matrix has no rows. Neighbours in a column of the matrix are
// `row_stride` elements apart, and neighbours in a row `col_stride`.
template <class Real>
static std::vector<Real> pack(int64_t width, const Real* x, int64_t row_stride, int64_t col_stride,
                              int64_t rows, int64_t depth) {
    std::vector<Real> panels(round_up(rows, width) * depth);
#pragma omp parallel for collapse(2) if (rows * depth > MIN_PARALLEL_ELEMENTS)
    for (int64_t first = 0; first < rows; first += width)
        for (int64_t d = 0; d < depth; d++)
            for (int64_t row = first; row < std::min(rows, first + width); row++)
                panels[first * depth + d * width + row - first] = x[row * row_stride + d * col_stride];
    return panels;
}

constexpr int64_t TILE_ROWS = 6, TILE_COLS = 16;  // a tile of c
constexpr int64_t DEPTH = 512;                    // a part of k

// c (m, n) += a (m, k) b (k, n). c is computed in tiles of 6 x 16 elements that stay in registers while the
// sum runs over k. a and b are copied to panels, so that the loop over k reads memory in order. A panel of a
// has 6 rows of a. A panel of b has 16 columns of b, which are rows of its transpose. k is cut into parts of
// 512, so that the panels of a part stay in the caches.
template <class Real>
void matmul(int64_t m, int64_t n, int64_t k, MatrixView<Real> a, MatrixView<Real> b, Real* c) {
    for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
        const int64_t depth = std::min(DEPTH, k - k0);
        const auto packed_a =
            pack(TILE_ROWS, a.data + k0 * a.col_stride, a.row_stride, a.col_stride, m, depth);
        const auto packed_b =
            pack(TILE_COLS, b.data + k0 * b.row_stride, b.col_stride, b.row_stride, n, depth);
#pragma omp parallel for collapse(2) if (m * n * depth > MIN_PARALLEL_PRODUCTS)
        for (int64_t j = 0; j < n; j += TILE_COLS)
            for (int64_t i = 0; i < m; i += TILE_ROWS) {
                const Real* panel_a = packed_a.data() + i * depth;
                const Real* panel_b = packed_b.data() + j * depth;
                Real sum[TILE_ROWS][TILE_COLS] = {};
                for (int64_t d = 0; d < depth; d++) {
                    for (int row = 0; row < TILE_ROWS; row++) {
#pragma omp simd
                        for (int col = 0; col < TILE_COLS; col++)
                            sum[row][col] += panel_a[row] * panel_b[col];
                    }
                    panel_a += TILE_ROWS;
                    panel_b += TILE_COLS;
                }
                // The last two loops read a copy of `sum`, because the compiler does not know their
                // bounds. If they read `sum` itself, it would be in memory in the loop over d, too, and
                // not in registers.
                Real copy[TILE_ROWS][TILE_COLS];
                for (int row = 0; row < TILE_ROWS; row++)
                    for (int col = 0; col < TILE_COLS; col++) copy[row][col] = sum[row][col];
                for (int64_t row = 0; row < std::min(TILE_ROWS, m - i); row++)
                    for (int64_t col = 0; col < std::min(TILE_COLS, n - j); col++)
                        c[(i + row) * n + j + col] += copy[row][col];
            }
    }
}

template void matmul(int64_t, int64_t, int64_t, MatrixView<float>, MatrixView<float>, float*);
template void matmul(int64_t, int64_t, int64_t, MatrixView<double>, MatrixView<double>, double*);

}  // namespace coat::reference
