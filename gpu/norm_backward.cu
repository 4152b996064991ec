// gpu/norm_backward.cu - RMSNorm and LayerNorm on the GPU, backward. One kernel computes the gradient of the
// norm's input row by row, and sums the gradients of weight and bias over the rows.
//
// With dy, the gradient of the norm's output, and d = dy weight:
//   LayerNorm   xhat = (x - mean) rstd, where rstd = 1 / sqrt(variance + eps)
//               dx = (d - mean(d) - xhat mean(d xhat)) rstd
//               dweight += dy xhat,  dbias += dy
//   RMSNorm     the same with mean = 0 and without mean(d) and dbias. So rstd is 1 / rms
//
// A team (gpu/norm.cuh) goes through many rows. In shared memory it has sums of its own, dweight (C) and
// dbias (C), over the rows that it has had so far. After the last row the thread block adds the sums of its
// teams, and writes the result to memory. Then reduce_partials() adds the results of all blocks
// (gpu/column_sums.cu). The number of blocks depends only on the shape (N, C) and on the number of
// multiprocessors. So the order of additions is always the same on GPUs of one kind.
#include "column_sums.h"
#include "norm.cuh"

namespace coat::gpu {
namespace {

// Adds a chunk of a row, v, to the sums (C) of a parameter's gradient. First come the first halves of all
// chunks, four floats each, and then the second halves, so that neighbouring threads use different banks:
//
//   entry      0        1         2         ...    C/8      C/8 + 1    C/8 + 2    ...
//   columns    0 - 3    8 - 11    16 - 19          4 - 7    12 - 15    20 - 23
__device__ void add_chunk_to_sums(float4* sums, uint32_t C, uint32_t col, const ChunkValues& v) {
    float4& a = sums[col / CHUNK_SIZE];
    float4& b = sums[(C + col) / CHUNK_SIZE];
    a = {a.x + v[0], a.y + v[1], a.z + v[2], a.w + v[3]};
    b = {b.x + v[4], b.y + v[5], b.z + v[6], b.w + v[7]};
}

// Adds up the sums of all teams, (blockDim.y, C) as add_chunk_to_sums() arranges them, and writes the result
// to row blockIdx.x of partials (blocks, C), with the columns in their usual order.
__device__ void write_partials(const float4* sums_of_teams, int C, float* partials) {
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < C / 4; i += blockDim.x * blockDim.y) {
        float4 total{};
        for (int team = 0; team < blockDim.y; team++) {
            const float4 one = sums_of_teams[team * (C / 4) + i];
            total = {total.x + one.x, total.y + one.y, total.z + one.z, total.w + one.w};
        }
        // Entry i has four columns: half a chunk. `col` is the first of them.
        const int half = i / (C / CHUNK_SIZE), col = i % (C / CHUNK_SIZE) * CHUNK_SIZE + half * 4;
        store_in_one_instruction(partials + int64_t(blockIdx.x) * C + col, total);
    }
}

// A thread's chunks of a row, as they are stored: of the norm's input, of dy, and of dresidual_in.
template <class StoredView> struct LoadedNormRow {
    using LoadedGradient = typename PlainView<typename StoredView::ComputeElement>::StoredChunk;
    typename StoredView::StoredChunk x[MAX_CHUNKS_PER_THREAD];
    LoadedGradient dy[MAX_CHUNKS_PER_THREAD], dresidual[MAX_CHUNKS_PER_THREAD];
};

// A row as dx needs it: the thread's chunks of xhat, and what holds for the whole row.
struct NormedRow {
    ChunkValues xhat[MAX_CHUNKS_PER_THREAD];
    RowStatistics statistics;
    float mean_d;  // RMSNorm: 0
    float mean_d_xhat;
};

// Computes xhat of a row from x and the row's statistics.
__device__ void compute_xhat(const ChunkValues (&x)[MAX_CHUNKS_PER_THREAD], NormedRow& row) {
    for (int c = 0; c < MAX_CHUNKS_PER_THREAD; c++)
        for (int j = 0; j < CHUNK_SIZE; j++)
            row.xhat[c][j] = (x[c][j] - row.statistics.mean) * row.statistics.rstd;
}

// The template parameter CHUNKS_PER_THREAD, below, is 3 or 4 if every thread has exactly so many chunks of a
// row. Then no chunk needs a condition, and the compiler can mix the instructions of all chunks. Otherwise it
// is UNEVEN, and each thread asks at run time which chunks lie inside the row. This serves speed alone: the
// numbers are the same.
constexpr int UNEVEN = 0;

// What happens to a row of a norm: load(), then compute_xhat_and_means(), then write_gradients(). `input` is
// the view of norm.input. The other views are of the tensors of NormBackwardTensors; dresidual_in may be no
// tensor.
template <class StoredView, bool RMS, int CHUNKS_PER_THREAD> struct RowBackward {
    using Element = typename StoredView::ComputeElement;
    Norm norm;
    StoredView input;
    PlainView<Element> dnorm_output, dresidual_in, dresidual_out;

    __device__ bool inside_row(int c) const {
        return CHUNKS_PER_THREAD != UNEVEN ? c < CHUNKS_PER_THREAD
                                           : first_column_of_chunk(c) < norm.input.cols;
    }

    // A row past the last one is zeros. So are a chunk past the end of its row, and dresidual_in if there is
    // none.
    __device__ LoadedNormRow<StoredView> load(int64_t row) const {
        LoadedNormRow<StoredView> loaded{};
        if (row >= norm.input.rows) return loaded;
        const int64_t row_begin = row * norm.input.cols;
        for (int c = 0; c < MAX_CHUNKS_PER_THREAD; c++) {
            if (!inside_row(c)) continue;
            loaded.x[c] = input.starting_at(row_begin).load(first_column_of_chunk(c));
            loaded.dy[c] = dnorm_output.starting_at(row_begin).load(first_column_of_chunk(c));
            if (dresidual_in.data)
                loaded.dresidual[c] = dresidual_in.starting_at(row_begin).load(first_column_of_chunk(c));
        }
        return loaded;
    }

    // Gives dy and d = dy weight of a chunk. compute_xhat_and_means() and write_gradients() both call it: to
    // keep dy and d in between would take many registers. The weight is read each time, from the cache.
    __device__ void get_dy_and_d(const LoadedNormRow<StoredView>& loaded, int c, ChunkValues& dy,
                                 ChunkValues& d) const {
        ChunkValues weight;
        dnorm_output.unpack(loaded.dy[c], dy);
        plain_view<Element>(norm.weight).load_values(first_column_of_chunk(c), weight);
        for (int j = 0; j < CHUNK_SIZE; j++) d[j] = dy[j] * weight[j];
    }

    // Computes xhat and the means over the row. All threads of the block must call it, because it calls
    // sum_over_row(), to which `buffer` is passed on.
    __device__ NormedRow compute_xhat_and_means(const LoadedNormRow<StoredView>& loaded, int buffer) const {
        const int64_t C = norm.input.cols;
        const float inverse_C = __fdiv_rn(1.0f, float(C));
        ChunkValues x[MAX_CHUNKS_PER_THREAD], dy, d;
        for (int c = 0; c < MAX_CHUNKS_PER_THREAD; c++) input.unpack(loaded.x[c], x[c]);
        NormedRow row;
        if constexpr (RMS) {
            // mean(d xhat) is mean(d x) / rms. So both sums need only x, not xhat, and are taken together.
            float sum[2] = {0, 0};  // of x^2, and of d x
            for (int c = 0; c < MAX_CHUNKS_PER_THREAD; c++) {
                if (!inside_row(c)) continue;
                get_dy_and_d(loaded, c, dy, d);
                for (int j = 0; j < CHUNK_SIZE; j++) {
                    // sum[0] must have the bits of forward: the operation of compute_row_statistics().
                    sum[0] = __fmaf_rn(x[c][j], x[c][j], sum[0]);
                    sum[1] += d[j] * x[c][j];
                }
            }
            sum_over_row(sum, buffer);
            row.statistics = {.mean = 0, .rstd = rstd_of(sum[0], C, norm.eps)};
            compute_xhat(x, row);
            row.mean_d = 0;
            row.mean_d_xhat = sum[1] * inverse_C * row.statistics.rstd;
        } else {
            // The statistics come first. Then xhat is known, which the means need.
            row.statistics = compute_row_statistics(x, C, /*rms=*/false, norm.eps);
            compute_xhat(x, row);
            float sum[2] = {0, 0};  // of d, and of d xhat
            for (int c = 0; c < MAX_CHUNKS_PER_THREAD; c++) {
                if (!inside_row(c)) continue;
                get_dy_and_d(loaded, c, dy, d);
                for (int j = 0; j < CHUNK_SIZE; j++) {
                    sum[0] += d[j];
                    sum[1] += d[j] * row.xhat[c][j];
                }
            }
            sum_over_row(sum, buffer);
            row.mean_d = sum[0] * inverse_C;
            row.mean_d_xhat = sum[1] * inverse_C;
        }
        return row;
    }

    // Writes dresidual_out = dresidual_in + dx, and adds the row to the sums dweight and dbias. `largest` is
    // the largest magnitude of dresidual_out so far.
    __device__ void write_gradients(int64_t row, const LoadedNormRow<StoredView>& loaded,
                                    const NormedRow& normed, float4* dweight, float4* dbias,
                                    float& largest) const {
        if (row >= norm.input.rows) return;
        const uint32_t C = uint32_t(norm.input.cols);
        for (int c = 0; c < MAX_CHUNKS_PER_THREAD; c++) {
            if (!inside_row(c)) continue;
            const ChunkValues& xhat = normed.xhat[c];
            ChunkValues dy, d, dresidual, dweight_of_row;
            get_dy_and_d(loaded, c, dy, d);
            dresidual_in.unpack(loaded.dresidual[c], dresidual);
            // dresidual is what dresidual_in holds, and becomes what dresidual_out is to hold
            for (int j = 0; j < CHUNK_SIZE; j++) {
                dresidual[j] +=
                    normed.statistics.rstd * (d[j] - normed.mean_d - xhat[j] * normed.mean_d_xhat);
                dweight_of_row[j] = dy[j] * xhat[j];
            }
            add_chunk_to_sums(dweight, C, first_column_of_chunk(c), dweight_of_row);
            if (!RMS) add_chunk_to_sums(dbias, C, first_column_of_chunk(c), dy);
            dresidual_out.starting_at(row * C).round_and_store(first_column_of_chunk(c), dresidual,
                                                               /*live=*/true);
            largest = larger_magnitude(largest, dresidual);
        }
    }
};

// The kernel of norm_backward() (gpu/norm.h). It writes dresidual_out and its amax, the row statistics, and
// the blocks' sums: partials (blocks, C) of dweight and, for LayerNorm, after them (blocks, C) of dbias.
//
// The row statistics are computed again (Norm in gpu/tensors.h says why). Their bits must be those of
// forward: wgrad computes the norm's output from them and quantizes it with the amax from forward, and a
// larger value would saturate.
template <class StoredView, bool RMS, int CHUNKS_PER_THREAD>
__global__ void __launch_bounds__(32 * MAX_WARPS_PER_TEAM)
    norm_backward_kernel(const RowBackward<StoredView, RMS, CHUNKS_PER_THREAD> row_backward,
                         float* dresidual_amax_to_raise, float* partials) {
    const int64_t rows = row_backward.norm.input.rows;
    const uint32_t C = uint32_t(row_backward.norm.input.cols);
    extern __shared__ float4 sums_of_teams[];  // (blockDim.y, C) of dweight; then, of LayerNorm, of dbias
    const uint32_t entries_per_team = C / 4;
    float4* const dweight = sums_of_teams + threadIdx.y * entries_per_team;
    float4* const dbias = dweight + blockDim.y * entries_per_team;
    for (uint32_t i = threadIdx.x; i < entries_per_team; i += blockDim.x) {
        dweight[i] = float4{};
        if (!RMS) dbias[i] = float4{};
    }
    __syncthreads();
    float largest = 0;
    // Two calls of sum_over_row() that follow each other need different buffers. RMSNorm makes one call for a
    // row, so the rows take turns. (LayerNorm makes two other calls in between, and could do without.)
    int buffer = 0;
    for (int64_t first_row = int64_t(blockIdx.x) * blockDim.y; first_row < rows;
         first_row += int64_t(gridDim.x) * blockDim.y) {
        const int64_t row = first_row + threadIdx.y;
        const LoadedNormRow<StoredView> loaded = row_backward.load(row);
        const NormedRow normed = row_backward.compute_xhat_and_means(loaded, buffer);
        if (row < rows && threadIdx.x == 0) row_backward.norm.row_statistics[row] = normed.statistics;
        row_backward.write_gradients(row, loaded, normed, dweight, dbias, largest);
        buffer = 1 - buffer;
    }
    if (dresidual_amax_to_raise) raise_amax_by_warp(dresidual_amax_to_raise, magnitude_bits(largest));
    __syncthreads();
    write_partials(sums_of_teams, C, partials);
    if (!RMS) write_partials(sums_of_teams + blockDim.y * entries_per_team, C, partials + gridDim.x * C);
}

// How many blocks there are decides in which order dweight and dbias are summed.
constexpr int NORM_BLOCKS_PER_SM = 4;
int max_norm_blocks() { return multiprocessors() * NORM_BLOCKS_PER_SM; }

template <int CHUNKS_PER_THREAD, bool RMS, class StoredView>
void launch_norm_backward(const Norm& n, StoredView input, const NormBackwardTensors& tensors,
                          float* workspace, unsigned blocks, cudaStream_t stream) {
    using Element = typename StoredView::ComputeElement;
    const dim3 block = block_shape(n.input.cols);
    const RowBackward<StoredView, RMS, CHUNKS_PER_THREAD> row_backward{
        .norm = n,
        .input = input,
        .dnorm_output = plain_view<Element>(tensors.dnorm_output.data),
        .dresidual_in = plain_view<Element>(tensors.dresidual_in.data),
        .dresidual_out = plain_view<Element>(tensors.dresidual_out.data)};
    const int shared_bytes = int((RMS ? 1 : 2) * block.y * n.input.cols * sizeof(float));
    launch("norm_backward", norm_backward_kernel<StoredView, RMS, CHUNKS_PER_THREAD>, blocks, block,
           shared_bytes, stream, row_backward, tensors.dresidual_amax_to_raise, workspace);
}

// Calls f with CHUNKS_PER_THREAD for rows of C elements. At the usual widths a thread has 3 chunks (for
// example with 768 columns), or 4 (with multiples of 1024). A round is one chunk for each thread of a team.
template <class F> void with_chunks_per_thread(int64_t C, F f) {
    const int64_t columns_per_round = block_shape(C).x * CHUNK_SIZE;
    if (C == 3 * columns_per_round) f(std::integral_constant<int, 3>{});
    else if (C == 4 * columns_per_round) f(std::integral_constant<int, 4>{});
    else f(std::integral_constant<int, UNEVEN>{});
}

}  // namespace

int64_t norm_backward_workspace_floats(int64_t C) { return 2 * max_norm_blocks() * C; }

void norm_backward(const Norm& n, const NormBackwardTensors& tensors, float* workspace, cudaStream_t stream) {
    const unsigned blocks =
        std::min(block_count(n.input.rows, block_shape(n.input.cols).y), unsigned(max_norm_blocks()));
    with_view(n.input, [&](auto input) {
        with_chunks_per_thread(n.input.cols, [&](auto chunks_per_thread) {
            constexpr int CHUNKS_PER_THREAD = decltype(chunks_per_thread)::value;
            if (n.rms)
                launch_norm_backward<CHUNKS_PER_THREAD, /*RMS=*/true>(n, input, tensors, workspace, blocks,
                                                                      stream);
            else
                launch_norm_backward<CHUNKS_PER_THREAD, /*RMS=*/false>(n, input, tensors, workspace, blocks,
                                                                       stream);
        });
    });
    reduce_partials(workspace, blocks, tensors.dweight, stream, n.rms ? TensorRef{} : tensors.dbias);
}

}  // namespace coat::gpu
