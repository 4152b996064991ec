// gpu/column_sums.cuh - what the threads of a block have of a column is combined: to column sums, and (in
// gpu/other_scaling.cu) to maxima.
#pragma once
#include "column_sums.h"
#include "lazy_tensor.cuh"

namespace coat::gpu {

// Combines the numbers that the threads of a block have of a column. `mine` has this thread's numbers, one
// for each of its 8 columns of each plane. A column has 16 numbers in the block. They are combined in the
// order of the rows, starting from the value 0: result = combine(result, number). Then take(column, result)
// is called, once for each column. `columns` is shared memory.
template <class Producer, class Number, class Combine, class Take>
__device__ void combine_columns(const Producer& producer, const ThreadTile& thread_tile,
                                const Number (&mine)[Producer::PLANES][CHUNK_SIZE],
                                Number (&columns)[SIDE_THREADS][TILE_SIDE + 1], Combine combine, Take take) {
    for (int p = 0; p < Producer::PLANES; p++) {
        __syncthreads();
        for (int j = 0; j < CHUNK_SIZE; j++)
            columns[thread_tile.down][thread_tile.across * CHUNK_SIZE + j] = mine[p][j];
        __syncthreads();
        const int64_t col = int64_t(blockIdx.x) * TILE_SIDE + threadIdx.x;
        if (threadIdx.x >= TILE_SIDE || col >= producer.plane_cols) continue;
        Number all = 0;
        for (int i = 0; i < SIDE_THREADS; i++) all = combine(all, columns[i][threadIdx.x]);
        take(p * producer.plane_cols + col, all);
    }
}

// Column sums. Each 128 columns have COLUMN_PARTIALS = 128 thread blocks. Block y adds up tile y of these
// columns, tile y + 128, and so on. A thread adds up its own rows of these tiles: `mine`. Then
// store_column_sums() adds the threads' sums and writes row y of partials (COLUMN_PARTIALS, PLANES *
// plane_cols). A multiprocessor has three such blocks, not four: the sums need registers, too.
constexpr int COLUMN_BLOCKS_PER_SM = 3;
inline dim3 column_grid(int64_t plane_cols) { return {block_count(plane_cols, TILE_SIDE), COLUMN_PARTIALS}; }
// In shared memory; a column is padding, against bank conflicts.
using ColumnSums = float[SIDE_THREADS][TILE_SIDE + 1];
template <class Producer>
__device__ void store_column_sums(const Producer& producer, const ChunkValues (&mine)[Producer::PLANES],
                                  ColumnSums& columns, float* partials) {
    combine_columns(
        producer, ThreadTile(blockIdx.y), mine, columns, [](float a, float b) { return a + b; },
        [&](int64_t col, float total) {
            partials[int64_t(blockIdx.y) * Producer::PLANES * producer.plane_cols + col] = total;
        });
}

}  // namespace coat::gpu
