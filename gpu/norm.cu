// gpu/norm.cu - residual add, RMSNorm and LayerNorm on the GPU, forward and backward, with what section 5 of
// the paper needs of them.
//
// Forward, one kernel adds a branch, the output of half a layer, to the residual stream. It has whole rows in
// registers, so it also does what the norm of the sum needs: it saves the norm's input, and computes the row
// statistics and the amax of the norm's output. It does not store the norm's output: the kernel that makes
// the next GEMM's operand computes that again (coat.cu).
//
// Backward, one kernel computes the gradient of the norm's input row by row, and sums the gradients of weight
// and bias over the rows.
#include "lazy_tensor.cuh"

namespace coat::gpu {
namespace {

// ===========================================================================================================
// How threads share out rows. A team, one warp or several, holds a row in registers. A block has one team or
// several: threadIdx.y is the number of a team in its block, threadIdx.x the number of a thread in its team.

constexpr int ROW_CHUNKS = 4;  // the most chunks that a thread has of a row
constexpr int ROW_WARPS = 16;  // the most warps of a team

// The shape of a block for rows of C columns. A team has as few warps as can hold a row. (ROW_WARPS of them
// hold 2^14 columns; require_supported() in common/known_models.h allows no more.) A block has four teams of
// one warp, or two of two warps, or one larger team.
dim3 block_shape(int64_t C) {
    const int64_t warps = ceil_div(C, 32 * CHUNK * ROW_CHUNKS);
    return {static_cast<unsigned>(32 * warps), static_cast<unsigned>(std::max<int64_t>(1, 4 / warps))};
}
// The first column of chunk 0, 1, 2 or 3 of this thread. Neighbouring threads have neighbouring chunks.
__device__ uint32_t first_column(int chunk) { return (chunk * blockDim.x + threadIdx.x) * CHUNK; }

// Adds numbers up over the threads of a team, which gives the sum over a row. The sums of a team's warps pass
// through a buffer in shared memory. There are two buffers, which sums use by turns: some thread may still be
// reading the buffer of one sum when another thread writes its part of the next sum. Before a buffer is used
// again, the __syncthreads() of the sum between has let all threads finish reading.
struct RowSum {
    int buffer = 0;  // the next sum uses buffer 0 or 1

    // x[i] becomes the sum of x[i] over all threads of the team. The order of additions is fixed, and all
    // threads get the same bits. All threads of the block call it, because it synchronizes them. (The
    // compiler makes two buffers for each COUNT.)
    template <int COUNT> __device__ void operator()(float (&x)[COUNT]) {
        __shared__ float buffers[2][COUNT][ROW_WARPS];
        float(&parts)[COUNT][ROW_WARPS] = buffers[buffer];
        buffer ^= 1;
        for (int i = 0; i < COUNT; i++) x[i] = sum_of_warp(x[i]);
        const int warps = blockDim.x / 32, first_warp = threadIdx.y * warps;
        if (warps == 1) return;
        if (threadIdx.x % 32 == 0)
            for (int i = 0; i < COUNT; i++) parts[i][first_warp + threadIdx.x / 32] = x[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            x[i] = 0;
            for (int w = 0; w < warps; w++) x[i] += parts[i][first_warp + w];
        }
    }
    // Switches to the other buffer without a sum. LayerNorm takes a sum where RMSNorm calls this. So both go
    // on with the same value of `buffer`, and the compiler can treat it as a constant.
    __device__ void skip() { buffer ^= 1; }
};

// 1 / sqrt(squares / C + eps)
__device__ float inverse_root(float squares, int64_t C, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, static_cast<float>(C)), eps)));
}

// The statistics of a row. x: the thread's chunks of the row; a chunk past the end of the row is zeros.
//
// Backward needs the same bits as forward: wgrad quantizes the norm's output once more, with the amax that
// forward has found (the comment above norm_backward_kernel() says more). The backward pass of LayerNorm
// calls this function, too. That of RMSNorm takes the sum of squares together with another sum, but adds in
// the same order.
__device__ RowStatistics row_statistics(const ChunkValues (&x)[ROW_CHUNKS], int64_t C, bool rms, float eps,
                                        RowSum& sum_over_row) {
    float sum[1] = {0};
    if (!rms) {
        for (int c = 0; c < ROW_CHUNKS; c++)
            for (int j = 0; j < CHUNK; j++) sum[0] += x[c][j];
        sum_over_row(sum);
    } else {
        sum_over_row.skip();
    }
    const float mean = __fdiv_rn(sum[0], static_cast<float>(C));
    float square[1] = {0};
    for (int c = 0; c < ROW_CHUNKS; c++)
        for (int j = 0; j < CHUNK; j++) {
            const float deviation = first_column(c) < C ? __fsub_rn(x[c][j], mean) : 0.0f;
            square[0] = __fmaf_rn(deviation, deviation, square[0]);
        }
    sum_over_row(square);
    return {mean, inverse_root(square[0], C, eps)};
}

// ===========================================================================================================
// Residual and norm, forward

// x: the thread's chunks of one input row. Returns the largest magnitude of the norm's output in these
// chunks, as bits. A chunk that is not live lies past the end of the row, or its row lies past the last row.
template <class Element, class Live>
__device__ uint32_t amax_bits_of_norm(const Norm& n, const ChunkValues (&x)[ROW_CHUNKS],
                                      RowStatistics statistics, Live live) {
    uint32_t largest_bits = 0;
    for (int c = 0; c < ROW_CHUNKS; c++) {
        if (!live(c)) continue;
        ChunkValues weight, bias;
        load_weight_and_bias<Element>(n, first_column(c), weight, bias);
        for (int j = 0; j < CHUNK; j++)
            largest_bits =
                max(largest_bits, magnitude_bits(norm_output(x[c][j], statistics, weight[j], bias[j])));
    }
    return largest_bits;
}

// Which row of `first` and which row of `second` add up to a given row of the sum.
struct RowsToAdd {
    int64_t first, second;
};

// Row r of the sum is
//   residual_add()   first[r] + second[r], the residual stream and a branch; tokens is null
//   embed()          first[tokens[r]] + second[r % T], the embedding and the positions
__device__ RowsToAdd rows_to_add(int64_t row, int64_t rows, const int32_t* tokens, int64_t T) {
    RowsToAdd from{.first = row, .second = row};
    if (tokens) {
        if (row < rows) from.first = tokens[row];
        from.second = static_cast<uint32_t>(row) % static_cast<uint32_t>(T);
    }
    return from;
}

// The kernel of residual_add() and of embed() (operators.h): sum = first + second, (N, C), by rows_to_add().
// `second` may be no tensor. The sum is written to x_out, if that is a tensor, and to norm_input, the memory
// of next_norm.in. For that norm, the kernel computes the row statistics and, if norm_output_amax_out is not
// null, the amax of the norm's output.
template <class StoredView, class Element = typename StoredView::ComputeElement>
__global__ void __launch_bounds__(32 * ROW_WARPS)
    residual_add_kernel(PlainView<Element> first, PlainView<Element> second, const int32_t* tokens, int64_t T,
                        PlainView<Element> x_out, StoredView norm_input, const Norm next_norm,
                        float* norm_output_amax_out) {
    using LoadedChunk = typename PlainView<Element>::LoadedChunk;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int64_t rows = next_norm.in.rows, C = next_norm.in.cols;
    auto live = [&](int c) { return row < rows && first_column(c) < C; };
    const RowsToAdd from = rows_to_add(row, rows, tokens, T);
    // `first` and `second` are tensors, from.first and from.second the rows of them that are added.
    LoadedChunk loaded_first[ROW_CHUNKS] = {}, loaded_second[ROW_CHUNKS] = {};
    for (int c = 0; c < ROW_CHUNKS; c++) {
        if (!live(c)) continue;
        loaded_first[c] = first.load(from.first * C + first_column(c));
        if (second.data) loaded_second[c] = second.load(from.second * C + first_column(c));
    }
    ChunkValues for_norm[ROW_CHUNKS] = {};  // the sum, as it is saved: the norm reads it
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; c++) {
        const int64_t i = row * C + first_column(c);
        ChunkValues addend, for_next_sum;
        first.unpack(loaded_first[c], for_next_sum);
        second.unpack(loaded_second[c], addend);
        if (second.data)
            for (int j = 0; j < CHUNK; j++) for_next_sum[j] = __fadd_rn(for_next_sum[j], addend[j]);
        // The sum is needed twice, because each of the two stores rounds its copy in place.
        for (int j = 0; j < CHUNK; j++) for_norm[c][j] = for_next_sum[j];
        if (x_out.data) x_out.round_in_place_and_store(i, for_next_sum, live(c));
        norm_input.round_in_place_and_store(i, for_norm[c], live(c));
    }
    RowSum sum_over_row;
    const RowStatistics statistics = row_statistics(for_norm, C, next_norm.rms, next_norm.eps, sum_over_row);
    if (row < rows && threadIdx.x == 0) next_norm.row_statistics[row] = statistics;
    if (norm_output_amax_out)
        update_amax_by_warp(norm_output_amax_out,
                            amax_bits_of_norm<Element>(next_norm, for_norm, statistics, live));
}

// Launches residual_add_kernel(); the two operators below say what it does.
void launch_residual_add(const char* what, const TensorRef& first, const TensorRef& second,
                         const int32_t* tokens, int64_t T, const ResidualSumOutputs& out,
                         cudaStream_t stream) {
    const Norm& next_norm = out.next_norm;
    const dim3 block = block_shape(next_norm.in.cols);
    with_view(next_norm.in, [&](auto in) {
        using Element = typename decltype(in)::ComputeElement;
        launch(what, residual_add_kernel<decltype(in)>, block_count(next_norm.in.rows, block.y), block,
               /*shared_bytes=*/0, stream, plain_view<Element>(first.data), plain_view<Element>(second.data),
               tokens, T, plain_view<Element>(out.x_out.data), in, next_norm, out.norm_output_amax_out);
    });
}

}  // namespace

void residual_add(const TensorRef& x, const TensorRef& branch, const ResidualSumOutputs& out,
                  cudaStream_t stream) {
    launch_residual_add("residual_add", x, branch, /*tokens=*/nullptr, /*T=*/1, out, stream);
}

void embed(const TensorRef& embedding, const TensorRef& positions, const int32_t* tokens, int64_t T,
           const ResidualSumOutputs& out, cudaStream_t stream) {
    launch_residual_add("embed", embedding, positions, tokens, T, out, stream);
}

// ===========================================================================================================
// Norm, backward. With xhat = (x - mean) / std, 1 / std being rstd, and d = dy * weight:
//   LayerNorm  dx = (d - mean(d) - xhat mean(d xhat)) / std
//   RMSNorm    dx = (d - xhat mean(d xhat)) / rms, with xhat = x / rms
//   both       dweight += dy xhat, dbias += dy
//
// A team goes through many rows. In shared memory it has sums of its own, dweight (C) and dbias (C), over the
// rows that it has had so far. At its end the block adds the sums of its teams and writes the result to
// memory. Then the sums of all blocks are added. The number of blocks depends only on the rows and on the
// GPU's multiprocessors. So the order of additions is always the same on GPUs of one kind.

namespace {

// Adds a chunk of a row, v, to the sums (C) of a parameter's gradient. First come the first halves of all
// chunks, four floats each, and then the second halves, so that neighbouring threads use different banks:
//
//   entry      0        1         2         ...    C/8      C/8 + 1    C/8 + 2    ...
//   columns    0 - 3    8 - 11    16 - 19          4 - 7    12 - 15    20 - 23
__device__ void add_chunk_to_sums(float4* sums, uint32_t C, uint32_t col, const ChunkValues& v) {
    float4& a = sums[col / CHUNK];
    float4& b = sums[(C + col) / CHUNK];
    a = {a.x + v[0], a.y + v[1], a.z + v[2], a.w + v[3]};
    b = {b.x + v[4], b.y + v[5], b.z + v[6], b.w + v[7]};
}

// Adds up the sums of all teams, (blockDim.y, C) as add_chunk_to_sums() arranges them, and writes the result
// to row blockIdx.x of partials (blocks, C), with the columns in their usual order.
__device__ void write_partials(const float4* sums_of_teams, int C, float* partials) {
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < C / 4; i += blockDim.x * blockDim.y) {
        float4 total{};
        for (int y = 0; y < blockDim.y; y++) {
            const float4 one = sums_of_teams[y * (C / 4) + i];
            total = {total.x + one.x, total.y + one.y, total.z + one.z, total.w + one.w};
        }
        // Entry i has four columns: half a chunk. `col` is the first of them.
        const int half = i / (C / CHUNK), col = i % (C / CHUNK) * CHUNK + half * 4;
        store_at_once(partials + static_cast<int64_t>(blockIdx.x) * C + col, total);
    }
}

// A thread's chunks of a row, as they are stored: of the norm's input, of dy, and of dresidual_in.
template <class StoredView> struct LoadedRow {
    using LoadedGradient = typename PlainView<typename StoredView::ComputeElement>::LoadedChunk;
    typename StoredView::LoadedChunk x[ROW_CHUNKS];
    LoadedGradient dy[ROW_CHUNKS], dresidual[ROW_CHUNKS];
};

// A row as dx needs it: the thread's chunks of xhat, and three numbers of the whole row.
struct NormedRow {
    ChunkValues xhat[ROW_CHUNKS];
    RowStatistics statistics;
    float mean_d;  // RMSNorm: 0
    float mean_d_xhat;

    // Computes xhat from x, once the statistics are known.
    __device__ void set_xhat(const ChunkValues (&x)[ROW_CHUNKS]) {
        for (int c = 0; c < ROW_CHUNKS; c++)
            for (int j = 0; j < CHUNK; j++) xhat[c][j] = (x[c][j] - statistics.mean) * statistics.rstd;
    }
};

// What happens to a row of a norm: load(), then normalize(), then write_gradients(). input is the memory
// of norm.in. The other tensors are those of NormBackwardTensors; dresidual_in may be no tensor.
//
// If every thread has the same number of chunks inside a row, 3 or 4, CHUNKS is this number. Then no chunk
// needs a condition, and the compiler can mix the instructions of all chunks. For other widths CHUNKS is 0:
// which chunks lie inside the row is known only at run time.
template <class StoredView, bool RMS, int CHUNKS> struct NormBackward {
    using Element = typename StoredView::ComputeElement;
    Norm norm;
    StoredView input;
    PlainView<Element> dy_in, dresidual_in, dresidual_out;

    __device__ bool inside_row(int c) const {
        return CHUNKS > 0 ? c < CHUNKS : first_column(c) < norm.in.cols;
    }

    // A row past the last one is zeros, and so is a chunk past the end of its row.
    __device__ LoadedRow<StoredView> load(int64_t row) const {
        LoadedRow<StoredView> loaded{};
        if (row >= norm.in.rows) return loaded;
        const int64_t row_begin = row * norm.in.cols;
        for (int c = 0; c < ROW_CHUNKS; c++) {
            if (!inside_row(c)) continue;
            loaded.x[c] = input.starting_at(row_begin).load(first_column(c));
            loaded.dy[c] = dy_in.starting_at(row_begin).load(first_column(c));
            if (dresidual_in.data)
                loaded.dresidual[c] = dresidual_in.starting_at(row_begin).load(first_column(c));
        }
        return loaded;
    }

    // The weight is read again where it is needed, from the cache.
    __device__ void get_dy_and_weight(const LoadedRow<StoredView>& loaded, int c, ChunkValues& dy,
                                      ChunkValues& weight) const {
        const PlainView<Element> weights = plain_view<Element>(norm.weight);
        dy_in.unpack(loaded.dy[c], dy);
        weights.unpack(weights.load(first_column(c)), weight);
    }

    // Calls f(c, j, d) for each element that the thread has of the row: element j of chunk c, d = dy weight.
    template <class F> __device__ void for_each_d(const LoadedRow<StoredView>& loaded, F f) const {
        for (int c = 0; c < ROW_CHUNKS; c++) {
            if (!inside_row(c)) continue;
            ChunkValues dy, weight;
            get_dy_and_weight(loaded, c, dy, weight);
            for (int j = 0; j < CHUNK; j++) f(c, j, dy[j] * weight[j]);
        }
    }

    // All threads of the block call it, because it takes sums along rows.
    __device__ NormedRow normalize(const LoadedRow<StoredView>& loaded, RowSum& sum_over_row) const {
        ChunkValues x[ROW_CHUNKS];
        for (int c = 0; c < ROW_CHUNKS; c++) input.unpack(loaded.x[c], x[c]);
        if constexpr (RMS) return normalize_by_rms(loaded, x, sum_over_row);
        else return normalize_by_mean_and_std(loaded, x, sum_over_row);
    }

    // LayerNorm: the statistics come first, and then the means, which need xhat.
    __device__ NormedRow normalize_by_mean_and_std(const LoadedRow<StoredView>& loaded,
                                                   const ChunkValues (&x)[ROW_CHUNKS],
                                                   RowSum& sum_over_row) const {
        NormedRow row;
        row.statistics = row_statistics(x, norm.in.cols, /*rms=*/false, norm.eps, sum_over_row);
        row.set_xhat(x);
        float sum[2] = {0, 0};  // of d, and of d xhat
        for_each_d(loaded, [&](int c, int j, float d) {
            sum[0] += d;
            sum[1] += d * row.xhat[c][j];
        });
        sum_over_row(sum);
        const float inverse_C = __fdiv_rn(1.0f, static_cast<float>(norm.in.cols));
        row.mean_d = sum[0] * inverse_C;
        row.mean_d_xhat = sum[1] * inverse_C;
        return row;
    }

    // RMSNorm: mean(d xhat) is mean(d x) / rms. So both sums are of x, and are taken together.
    __device__ NormedRow normalize_by_rms(const LoadedRow<StoredView>& loaded,
                                          const ChunkValues (&x)[ROW_CHUNKS], RowSum& sum_over_row) const {
        float sum[2] = {0, 0};  // of x^2, and of d x
        for_each_d(loaded, [&](int c, int j, float d) {
            sum[0] = __fmaf_rn(x[c][j], x[c][j], sum[0]);
            sum[1] += d * x[c][j];
        });
        sum_over_row(sum);
        NormedRow row;
        row.statistics = {.mean = 0, .rstd = inverse_root(sum[0], norm.in.cols, norm.eps)};
        row.set_xhat(x);
        row.mean_d = 0;
        const float inverse_C = __fdiv_rn(1.0f, static_cast<float>(norm.in.cols));
        row.mean_d_xhat = sum[1] * inverse_C * row.statistics.rstd;
        return row;
    }

    // Writes dresidual_out = dresidual_in + dx, and adds the row to the sums dweight and dbias. `largest` is
    // the largest magnitude of dresidual_out so far.
    __device__ void write_gradients(int64_t row, const LoadedRow<StoredView>& loaded, const NormedRow& normed,
                                    float4* dweight, float4* dbias, float& largest) const {
        if (row >= norm.in.rows) return;
        const uint32_t C = static_cast<uint32_t>(norm.in.cols);
        for (int c = 0; c < ROW_CHUNKS; c++) {
            if (!inside_row(c)) continue;
            const ChunkValues& xhat = normed.xhat[c];
            ChunkValues dy, weight, dresidual, dweight_of_row;
            get_dy_and_weight(loaded, c, dy, weight);
            dresidual_in.unpack(loaded.dresidual[c], dresidual);
            for (int j = 0; j < CHUNK; j++) {
                const float d = dy[j] * weight[j];
                dresidual[j] += normed.statistics.rstd * (d - normed.mean_d - xhat[j] * normed.mean_d_xhat);
                dweight_of_row[j] = dy[j] * xhat[j];
            }
            add_chunk_to_sums(dweight, C, first_column(c), dweight_of_row);
            if (!RMS) add_chunk_to_sums(dbias, C, first_column(c), dy);
            dresidual_out.starting_at(row * C).round_in_place_and_store(first_column(c), dresidual, true);
            largest = larger_magnitude(largest, dresidual);
        }
    }
};

// The kernel of norm_backward() (operators.h). It writes dresidual_out and its amax, the row statistics, and
// the blocks' sums: partials (blocks, C) of dweight and, for LayerNorm, after them (blocks, C) of dbias.
//
// The row statistics are computed again, because all norms have the same memory for them: later norms have
// overwritten those of forward. Their bits must be those of forward: wgrad computes the norm's output from
// them and quantizes it with the amax from forward, and a larger value would saturate.
template <class StoredView, bool RMS, int CHUNKS>
__global__ void __launch_bounds__(32 * ROW_WARPS)
    norm_backward_kernel(const NormBackward<StoredView, RMS, CHUNKS> backward, float* dresidual_amax_out,
                         float* partials) {
    const int64_t rows = backward.norm.in.rows;
    const uint32_t C = static_cast<uint32_t>(backward.norm.in.cols);
    extern __shared__ float4 sums_of_teams[];  // (blockDim.y, C) of dweight; then, of LayerNorm, of dbias
    const uint32_t float4s = C / 4;
    float4* const dweight = sums_of_teams + threadIdx.y * float4s;
    float4* const dbias = dweight + blockDim.y * float4s;
    for (uint32_t i = threadIdx.x; i < float4s; i += blockDim.x) {
        dweight[i] = float4{};
        if (!RMS) dbias[i] = float4{};
    }
    __syncthreads();
    RowSum sum_over_row;
    float largest = 0;
    for (int64_t first_row = static_cast<int64_t>(blockIdx.x) * blockDim.y; first_row < rows;
         first_row += static_cast<int64_t>(gridDim.x) * blockDim.y) {
        const int64_t row = first_row + threadIdx.y;
        const LoadedRow<StoredView> loaded = backward.load(row);
        const NormedRow normed = backward.normalize(loaded, sum_over_row);
        if (row < rows && threadIdx.x == 0) backward.norm.row_statistics[row] = normed.statistics;
        backward.write_gradients(row, loaded, normed, dweight, dbias, largest);
    }
    if (dresidual_amax_out) update_amax_by_warp(dresidual_amax_out, magnitude_bits(largest));
    __syncthreads();
    write_partials(sums_of_teams, C, partials);
    if (!RMS) write_partials(sums_of_teams + blockDim.y * float4s, C, partials + gridDim.x * C);
}

// How many blocks there are decides in which order dweight and dbias are summed.
constexpr int NORM_BLOCKS_PER_SM = 4;
int most_norm_blocks() { return multiprocessors() * NORM_BLOCKS_PER_SM; }

template <class StoredView, bool RMS, int CHUNKS>
void launch_norm_backward(const Norm& n, StoredView in, const NormBackwardTensors& g, float* workspace,
                          unsigned blocks, cudaStream_t stream) {
    using Element = typename StoredView::ComputeElement;
    const dim3 block = block_shape(n.in.cols);
    const NormBackward<StoredView, RMS, CHUNKS> backward{
        .norm = n,
        .input = in,
        .dy_in = plain_view<Element>(g.dy.data),
        .dresidual_in = plain_view<Element>(g.dresidual_in.data),
        .dresidual_out = plain_view<Element>(g.dresidual_out.data)};
    const int shared_bytes = static_cast<int>((RMS ? 1 : 2) * block.y * n.in.cols * sizeof(float));
    launch("norm_backward", norm_backward_kernel<StoredView, RMS, CHUNKS>, blocks, block, shared_bytes,
           stream, backward, g.dresidual_amax_out, workspace);
}

// At the usual widths a thread has 3 chunks (768 columns), or 4 (multiples of 1024). A round is one chunk for
// each thread of a team.
template <class StoredView, bool RMS>
void launch_for_width(const Norm& n, StoredView in, const NormBackwardTensors& g, float* workspace,
                      unsigned blocks, cudaStream_t stream) {
    const int64_t C = n.in.cols, columns_per_round = block_shape(C).x * CHUNK;
    auto* launch_variant = launch_norm_backward<StoredView, RMS, /*CHUNKS=*/0>;
    if (C == 3 * columns_per_round) launch_variant = launch_norm_backward<StoredView, RMS, 3>;
    if (C == 4 * columns_per_round) launch_variant = launch_norm_backward<StoredView, RMS, 4>;
    launch_variant(n, in, g, workspace, blocks, stream);
}

}  // namespace

int64_t norm_backward_workspace_floats(int64_t C) { return 2 * most_norm_blocks() * C; }

void norm_backward(const Norm& n, const NormBackwardTensors& g, float* workspace, cudaStream_t stream) {
    const unsigned blocks =
        std::min(block_count(n.in.rows, block_shape(n.in.cols).y), static_cast<unsigned>(most_norm_blocks()));
    with_view(n.in, [&](auto in) {
        if (n.rms) launch_for_width<decltype(in), /*RMS=*/true>(n, in, g, workspace, blocks, stream);
        else launch_for_width<decltype(in), /*RMS=*/false>(n, in, g, workspace, blocks, stream);
    });
    reduce_partials(workspace, blocks, g.dweight, stream, n.rms ? TensorRef{} : g.dbias);
}

}  // namespace coat::gpu
