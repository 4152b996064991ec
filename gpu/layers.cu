// gpu/layers.cu - what any transformer has around its GEMMs, attention and norms: RoPE, the loss, the
// embedding's backward pass, and qk_norms. (The embedding's forward pass is embed() in gpu/norm.cu, because
// the first norm follows it.)
#include <cuda_pipeline.h>

#include <algorithm>
#include <numeric>

#include "../common/step.h"
#include "column_sums.h"
#include "layers.cuh"
#include "layers.h"

namespace coat::gpu {

// ===========================================================================================================
// RoPE: the pairs (x_i, x_{i + HS/2}) of a head are rotated by the angle position * f_i

// The frequency of pair i of a head: f_i = theta^(-2i / HS), scaled as the model wants it
// (common/architecture.h, RopeScaling). A part of f_i, between 0 and 1, is kept as it is, and the rest is
// divided by the scaling's factor. The part that is kept depends on how many rotations f_i makes in the
// original positions: it is 0 up to low_freq_factor, 1 from high_freq_factor on, and linear between.
static __device__ double rope_frequency(double theta, int i, int half, const RopeScaling& s) {
    const double f = pow(theta, -double(i) / half);
    if (s.type == RopeScaling::Default) return f;
    const double rotations = double(s.original_positions) * f / (2 * 3.14159265358979323846);
    const double transition = double(s.high_freq_factor) - s.low_freq_factor;
    const double kept = fmin(fmax((rotations - s.low_freq_factor) / transition, 0.0), 1.0);
    return f * (kept + (1 - kept) / s.factor);
}

// Fills the table: table[t, i] is {cos, sin} of the angle t f_i. It has n elements, `half` = HS / 2 for each
// position t. Angles are in double, because they reach thousands of radians.
static __global__ void fill_rope_table_kernel(int64_t n, int half, double theta, RopeScaling scaling,
                                              float2* table) {
    const int64_t i = thread_of_grid();
    if (i >= n) return;
    const double f = rope_frequency(theta, int(i % half), half, scaling);
    const double angle = double(i / half) * f;
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    table[i] = {float(cosine), float(sine)};
}

// Rotates qkv in place, by the angles times `sign`. A thread has four pairs in each of ROPE_HEADS heads of a
// row, with the same four angles in all of these heads. (It has four pairs, not eight, because half a head
// need not be a multiple of eight.) Heads from `rotated_heads` on, which are those of v, are not rotated; the
// amax takes them into account.
constexpr int ROPE_HEADS = 8, ROPE_THREADS = 256;
template <class Element>
static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_kernel(PlainView<Element, 4> qkv, Rope rope, uint32_t rows, int64_t cols, uint32_t heads, float sign,
                float* qkv_amax_to_raise) {
    const uint32_t half = uint32_t(rope.HS) / 2, quads = half / 4;
    const uint32_t rotated_heads = uint32_t(rope.rotated_cols / rope.HS);
    const uint32_t i = blockIdx.x * ROPE_THREADS + threadIdx.x, row = i / quads, pair = i % quads * 4;
    const uint32_t first_head = blockIdx.y * ROPE_HEADS;
    float largest = 0;
    if (row < rows) {
        const PlainView<Element, 4> pairs = qkv.starting_at(row * cols + first_head * rope.HS + pair);
        typename PlainView<Element, 4>::StoredChunk loaded[ROPE_HEADS][2] = {};
        for (int h = 0; h < ROPE_HEADS; h++) {
            if (first_head + h >= heads) continue;
            loaded[h][0] = pairs.load(h * rope.HS);
            loaded[h][1] = pairs.load(h * rope.HS + half);
        }
        const float2* const table = rope.table + row % uint32_t(rope.T) * half + pair;
        float cosines[4], sines[4];
        for (int j = 0; j < 4; j += 2) {
            const float4 two = reinterpret_cast<const float4*>(table)[j / 2];
            cosines[j] = two.x;
            cosines[j + 1] = two.z;
            sines[j] = sign * two.y;
            sines[j + 1] = sign * two.w;
        }
        for (int h = 0; h < ROPE_HEADS; h++) {
            if (first_head + h >= heads) break;
            float x[4], y[4];
            pairs.unpack(loaded[h][0], x);
            pairs.unpack(loaded[h][1], y);
            if (first_head + h < rotated_heads) {
                for (int j = 0; j < 4; j++) rotate(x[j], y[j], cosines[j], sines[j]);
                pairs.round_and_store(h * rope.HS, x, true);
                pairs.round_and_store(h * rope.HS + half, y, true);
            }
            if (qkv_amax_to_raise) largest = larger_magnitude(larger_magnitude(largest, x), y);
        }
    }
    if (qkv_amax_to_raise) raise_amax_by_warp(qkv_amax_to_raise, magnitude_bits(largest));
}

void rope(const Rope& r, const TensorRef& qkv, bool inverse, float* qkv_amax_to_raise, cudaStream_t stream) {
    const int64_t quads = qkv.rows * r.HS / 8, heads = (qkv_amax_to_raise ? qkv.cols : r.rotated_cols) / r.HS;
    const dim3 grid(block_count(quads, ROPE_THREADS), block_count(heads, ROPE_HEADS));
    with_plain_view(qkv, [&](auto x) {
        using Element = typename decltype(x)::ComputeElement;
        launch("rope", rope_kernel<Element>, grid, ROPE_THREADS, /*shared_bytes=*/0, stream,
               PlainView<Element, 4>{x.data}, r, uint32_t(qkv.rows), qkv.cols, uint32_t(heads),
               inverse ? -1 : 1, qkv_amax_to_raise);
    });
}

void fill_rope_table(const ModelConfig& config, int64_t positions, float2* table, cudaStream_t stream) {
    const int64_t half = config.HS() / 2;
    launch("fill_rope_table", fill_rope_table_kernel, block_count(positions * half, 256), 256,
           /*shared_bytes=*/0, stream, positions * half, int(half), config.rope_theta, config.rope_scaling,
           table);
}

// ===========================================================================================================
// Cross-entropy

namespace {

// What a part of a row contributes to the softmax's denominator, computed in one pass: the maximum of the
// part, and its sum of exp(x - maximum). merge() adds another part: the sum with the smaller maximum is
// rescaled.
struct Softmax {
    float maximum, sum;
    __device__ void merge(const Softmax& other) {
        const float maximum_of_both = fmaxf(maximum, other.maximum);
        sum = sum * factor(maximum, maximum_of_both) + other.sum * factor(other.maximum, maximum_of_both);
        maximum = maximum_of_both;
    }
    static __device__ float factor(float from, float to) {
        return from == to ? 1.0f : fast_exp2((from - to) * LOG2_E);
    }
};

}  // namespace

constexpr int LOSS_THREADS = 512;
// Merges the parts of all threads: first within each warp, then those of the warps in order. Every thread
// gets the same bits. `parts` is shared memory. Two successive calls need different places there: a thread
// may still be reading the first when another thread writes the second.
static __device__ Softmax softmax_of_block(Softmax mine, Softmax (&parts)[LOSS_THREADS / 32]) {
    for (int distance = 16; distance > 0; distance /= 2)
        mine.merge({__shfl_down_sync(ALL_LANES, mine.maximum, distance),
                    __shfl_down_sync(ALL_LANES, mine.sum, distance)});
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
    __syncthreads();
    Softmax all{-INFINITY, 0};
    for (const Softmax& of_warp : parts) all.merge(of_warp);
    return all;
}

// The losses of rows of logits and, if `gradients`, the gradients, which take the place of the logits. Block
// b has the rows b, b + gridDim.x, ... It reads a row twice: for the loss, and for the gradients. CACHED_ROWS
// says how many rows it caches in shared memory, each in a slot:
//   2   Both times the block reads the row from shared memory. Meanwhile it copies the next row to the other
//       slot. A thread copies what it will read itself, so it need not wait for the copies of others.
//   1   For the loss the block reads the row from memory and copies it to shared memory. For the gradients it
//       reads the row from there. It has only this row.
//   0   Both times the block reads the row from memory, or from the L2 cache. It has only this row.
constexpr int loss_blocks_per_sm(int cached_rows, size_t element_bytes) {
    if (cached_rows == 2) return 1;
    return element_bytes < 4 ? 3 : 2;
}
template <class Element, int CACHED_ROWS>
static __global__ void __launch_bounds__(LOSS_THREADS, loss_blocks_per_sm(CACHED_ROWS, sizeof(Element)))
    cross_entropy_kernel(PlainView<Element> logits, int64_t rows, int stride, int V, const int32_t* targets,
                         bool gradients, const double* loss_weight, float* losses) {
    using StoredChunk = typename PlainView<Element>::StoredChunk;
    constexpr int COLS_OF_BLOCK = LOSS_THREADS * CHUNK_SIZE, IN_FLIGHT = 4;
    extern __shared__ __align__(16) unsigned char shared[];  // (CACHED_ROWS, stride) Element
    __shared__ Softmax parts[2][LOSS_THREADS / 32];
    const int first_col = threadIdx.x * CHUNK_SIZE;
    const float weight = gradients ? float(*loss_weight) : 0.0f;
    Element* const cached = reinterpret_cast<Element*>(shared);
    auto start_copy = [&](int64_t row, Element* to) {
        if (CACHED_ROWS < 2 || row >= rows) return;
        const Element* const from = logits.data + row * stride;
        constexpr int COLS_OF_COPY = 16 / sizeof(Element);
        for (int col = first_col; col < stride; col += COLS_OF_BLOCK)
            for (int i = col; i < col + CHUNK_SIZE; i += COLS_OF_COPY)
                __pipeline_memcpy_async(to + i, from + i, 16);
        __pipeline_commit();
    };

    start_copy(blockIdx.x, cached);
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const int slot = CACHED_ROWS == 2 ? uint32_t(row) / gridDim.x % 2 : 0;
        const PlainView<Element> in_memory = logits.starting_at(row * stride),
                                 in_cache{cached + slot * stride};
        const PlainView<Element> for_loss = CACHED_ROWS == 2 ? in_cache : in_memory;
        const PlainView<Element> for_gradients = CACHED_ROWS == 0 ? in_memory : in_cache;
        const int32_t target = targets[row];
        const float correct = in_memory.data[max(target, 0)];
        // The number of columns that count: none in a row without a target, whose loss and gradients are 0.
        const int live_cols = target == NO_TARGET ? 0 : V;
        // Replaces, in a chunk, the columns that do not count.
        auto replace_dead = [&](int col, ChunkValues& x, float with) {
            if (col + CHUNK_SIZE <= live_cols) return;
            for (int j = 0; j < CHUNK_SIZE; j++) x[j] = col + j < live_cols ? x[j] : with;
        };
        if (CACHED_ROWS == 2) __pipeline_wait_prior(0);
        start_copy(row + gridDim.x, cached + (1 - slot) * stride);

        Softmax mine{-INFINITY, 0};
        for (int begin = first_col; begin < live_cols; begin += IN_FLIGHT * COLS_OF_BLOCK) {
            StoredChunk loaded[IN_FLIGHT];
            for (int i = 0; i < IN_FLIGHT; i++)
                if (begin + i * COLS_OF_BLOCK < live_cols)
                    loaded[i] = for_loss.load(begin + i * COLS_OF_BLOCK);
            for (int i = 0; i < IN_FLIGHT; i++) {
                const int col = begin + i * COLS_OF_BLOCK;
                if (col >= live_cols) break;
                if (CACHED_ROWS == 1) *reinterpret_cast<StoredChunk*>(in_cache.data + col) = loaded[i];
                ChunkValues x;
                logits.unpack(loaded[i], x);
                replace_dead(col, x, -INFINITY);
                float maximum = x[0];
                for (int j = 1; j < CHUNK_SIZE; j++) maximum = fmaxf(maximum, x[j]);
                if (maximum > mine.maximum) mine.merge({maximum, 0.0f});
                const float offset = -mine.maximum * LOG2_E;
                for (int j = 0; j < CHUNK_SIZE; j++) mine.sum += fast_exp2(__fmaf_rn(x[j], LOG2_E, offset));
            }
        }
        const Softmax all = softmax_of_block(mine, parts[slot]);
        const float lse = all.maximum + logf(all.sum), offset = -lse * LOG2_E;
        if (threadIdx.x == 0) losses[row] = live_cols > 0 ? lse - correct : 0.0f;
        // The gradients: (softmax - one_hot(target)) * weight
        if (!gradients) continue;
#pragma unroll 4
        for (int col = first_col; col < stride; col += COLS_OF_BLOCK) {
            ChunkValues x;
            for_gradients.load_values(col, x);
            for (int j = 0; j < CHUNK_SIZE; j++) x[j] = fast_exp2(__fmaf_rn(x[j], LOG2_E, offset)) * weight;
            if (uint32_t(target - col) < CHUNK_SIZE)
                for (int j = 0; j < CHUNK_SIZE; j++) x[j] -= col + j == target ? weight : 0.0f;
            replace_dead(col, x, 0.0f);
            in_memory.store(col, x, true);
        }
    }
}

// A single block adds up the losses: there are few, and their order must not depend on the GPU.
constexpr int SUM_THREADS = 1024;
static __global__ void __launch_bounds__(SUM_THREADS)
    add_loss_sum_kernel(const float* losses, int64_t n, const double* loss_weight, double* total) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += SUM_THREADS) sum += losses[i];
    sum = sum_of_block<SUM_THREADS>(sum);
    if (threadIdx.x == 0) *total += *loss_weight * sum;
}

static void launch_cross_entropy(const TensorRef& logits, int64_t V, const int32_t* targets, bool gradients,
                                 const double* loss_weight, float* losses, cudaStream_t stream) {
    with_plain_view(logits, [&](auto x) {
        using Element = typename decltype(x)::ComputeElement;
        const int64_t row_bytes = logits.cols * int64_t(sizeof(Element));
        const int64_t shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10) - 1024;
        // Where three rows fit, three blocks with a slot each are faster than one block with two slots.
        const int64_t fitting = shared / row_bytes;
        const int64_t cached_rows = fitting == 2 ? 2 : std::min<int64_t>(fitting, 1);
        auto kernel = cross_entropy_kernel<Element, 0>;
        if (cached_rows == 1) kernel = cross_entropy_kernel<Element, 1>;
        if (cached_rows == 2) kernel = cross_entropy_kernel<Element, 2>;
        const int64_t grid =
            cached_rows == 2 ? std::min<int64_t>(logits.rows, multiprocessors()) : logits.rows;
        launch("cross_entropy", kernel, unsigned(grid), LOSS_THREADS, int(cached_rows * row_bytes), stream, x,
               logits.rows, int(logits.cols), int(V), targets, gradients, loss_weight, losses);
    });
}
void cross_entropy_forward(const TensorRef& logits, int64_t V, const int32_t* targets, float* losses,
                           cudaStream_t stream) {
    launch_cross_entropy(logits, V, targets, /*gradients=*/false, /*loss_weight=*/nullptr, losses, stream);
}
void cross_entropy_forward_and_backward(const TensorRef& logits, int64_t V, const int32_t* targets,
                                        const double* loss_weight, float* losses, cudaStream_t stream) {
    launch_cross_entropy(logits, V, targets, /*gradients=*/true, loss_weight, losses, stream);
}

void add_loss_sum(const float* losses, int64_t n, const double* loss_weight, double* total,
                  cudaStream_t stream) {
    launch("add_loss_sum", add_loss_sum_kernel, 1, SUM_THREADS, /*shared_bytes=*/0, stream, losses, n,
           loss_weight, total);
}

// ===========================================================================================================
// Embedding, backward
//
// The gradient of a token's row is the sum of the rows of g at which the token stands, in order. A token that
// stands at RUN_ROWS rows or fewer is rare, and its rows are added up by one thread for each chunk of
// columns. A token that is half of the text must not keep the GPU waiting: the rows of a frequent token are
// added up by the warps of a block, RUN_ROWS at a time, and then the sums of these runs are added.

constexpr int RUN_ROWS = 32;

EmbeddingOrder embedding_order(const int32_t* tokens, int64_t N) {
    EmbeddingOrder result;
    result.row_order.resize(N);
    std::iota(result.row_order.begin(), result.row_order.end(), 0);
    std::stable_sort(result.row_order.begin(), result.row_order.end(),
                     [&](int32_t a, int32_t b) { return tokens[a] < tokens[b]; });
    for (int32_t i = 0; i < N; i++) {
        const int32_t token = tokens[result.row_order[i]];
        if (i == 0 || token != result.token_rows.back().token) result.token_rows.push_back({token, i, 0});
        result.token_rows.back().count++;
    }
    // The longest sums start first.
    std::stable_sort(result.token_rows.begin(), result.token_rows.end(),
                     [](const TokenRows& a, const TokenRows& b) { return a.count > b.count; });
    for (const TokenRows& t : result.token_rows) result.frequent_count += t.count > RUN_ROWS ? 1 : 0;
    return result;
}

// sum becomes the sum of the rows row_of(begin), ..., row_of(end - 1) of g, added in this order, in the
// chunk that begins with column col.
template <class RowOf>
static __device__ void sum_rows(const Bf16OrFp32View& g, int64_t C, int64_t col, int begin, int end,
                                RowOf row_of, ChunkValues& sum) {
    for (int j = 0; j < CHUNK_SIZE; j++) sum[j] = 0;
#pragma unroll 8
    for (int i = begin; i < end; i++) {
        ChunkValues v;
        g.load_values(row_of(i) * C + col, v);
        for (int j = 0; j < CHUNK_SIZE; j++) sum[j] += v[j];
    }
}

static __device__ void add_to_gradient(const Bf16OrFp32View& gradient, int64_t i, const ChunkValues& sum) {
    ChunkValues total;
    gradient.load_values(i, total);
    for (int j = 0; j < CHUNK_SIZE; j++) total[j] += sum[j];
    gradient.store(i, total, true);
}

// blockIdx.x is the number of a rare token. A thread has a chunk of columns.
static __global__ void embedding_backward_rare_kernel(Bf16OrFp32View g, int64_t C, const int32_t* row_order,
                                                      const TokenRows* token_rows, Bf16OrFp32View gradient) {
    const TokenRows rows = token_rows[blockIdx.x];
    const int64_t col = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * CHUNK_SIZE;
    if (col >= C) return;
    auto row_of = [&](int i) -> int64_t { return row_order[i]; };
    ChunkValues sum;
    sum_rows(g, C, col, rows.first, rows.first + rows.count, row_of, sum);
    add_to_gradient(gradient, rows.token * C + col, sum);
}

// blockIdx.x is the number of a frequent token. In a round each warp of the block adds up a run of its rows;
// then the first warp adds these sums, in order, to those of the rounds before. A lane has a chunk of
// columns.
constexpr int RUNS = 8;  // runs of a round
static __global__ void __launch_bounds__(32 * RUNS)
    embedding_backward_frequent_kernel(Bf16OrFp32View g, int64_t C, const int32_t* row_order,
                                       const TokenRows* token_rows, Bf16OrFp32View gradient) {
    __shared__ ChunkValues sums[RUNS][32];
    const TokenRows rows = token_rows[blockIdx.x];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t col = (int64_t(blockIdx.y) * 32 + lane) * CHUNK_SIZE;
    auto row_of = [&](int i) -> int64_t { return row_order[i]; };
    ChunkValues total = {};
    for (int first = 0; first < rows.count; first += RUNS * RUN_ROWS) {
        const int begin = first + warp * RUN_ROWS;
        const int end = col < C ? min(begin + RUN_ROWS, rows.count) : begin;
        ChunkValues sum;
        sum_rows(g, C, col, rows.first + begin, rows.first + end, row_of, sum);
        for (int j = 0; j < CHUNK_SIZE; j++) sums[warp][lane][j] = sum[j];
        __syncthreads();
        const int runs = min(RUNS, int(ceil_div(rows.count - first, RUN_ROWS)));
        for (int r = 0; warp == 0 && r < runs; r++)
            for (int j = 0; j < CHUNK_SIZE; j++) total[j] += sums[r][lane][j];
        __syncthreads();
    }
    if (warp == 0 && col < C) add_to_gradient(gradient, rows.token * C + col, total);
}

// blockIdx.x is a position t. Each sequence has one row of this position: the rows t, T + t, 2 T + t, ...
static __global__ void positions_backward_kernel(Bf16OrFp32View g, int64_t N, int64_t C, int64_t T,
                                                 Bf16OrFp32View gradient) {
    const int64_t t = blockIdx.x;
    const int64_t col = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * CHUNK_SIZE;
    if (col >= C) return;
    auto row_of = [&](int sequence) { return sequence * T + t; };
    ChunkValues sum;
    sum_rows(g, C, col, 0, int(ceil_div(N - t, T)), row_of, sum);
    add_to_gradient(gradient, t * C + col, sum);
}

// The number of threads of a block that has a row of g, each thread having one of its chunks. If a row has
// more than 256 chunks, several blocks have it.
static unsigned threads_of_row(int64_t cols) {
    return unsigned(std::min<int64_t>(256, round_up(cols / CHUNK_SIZE, 32)));
}

void embedding_backward(const TensorRef& g, const EmbeddingOrderRef& order, const TensorRef& gradient,
                        cudaStream_t stream) {
    const dim3 frequent_grid(unsigned(order.frequent_count), block_count(g.cols, 32 * CHUNK_SIZE));
    launch("embedding_backward", embedding_backward_frequent_kernel, frequent_grid, 32 * RUNS,
           /*shared_bytes=*/0, stream, bf16_or_fp32(g), g.cols, order.row_order, order.token_rows,
           bf16_or_fp32(gradient));
    const unsigned threads = threads_of_row(g.cols);
    const unsigned rare = unsigned(order.count - order.frequent_count);
    const dim3 rare_grid(rare, block_count(g.cols, threads * CHUNK_SIZE));
    launch("embedding_backward", embedding_backward_rare_kernel, rare_grid, threads, /*shared_bytes=*/0,
           stream, bf16_or_fp32(g), g.cols, order.row_order, order.token_rows + order.frequent_count,
           bf16_or_fp32(gradient));
}

void positions_backward(const TensorRef& g, int64_t T, const TensorRef& gradient, cudaStream_t stream) {
    const unsigned threads = threads_of_row(g.cols);
    const dim3 grid(unsigned(std::min(T, g.rows)), block_count(g.cols, threads * CHUNK_SIZE));
    launch("positions_backward", positions_backward_kernel, grid, threads, /*shared_bytes=*/0, stream,
           bf16_or_fp32(g), g.rows, g.cols, T, bf16_or_fp32(gradient));
}

// ===========================================================================================================
// Norms of heads (Qwen3): y = x r weight with r = 1 / rms(x), for each head of q and of k
//
// Eight neighbouring threads have a head. Of every 32 columns of it, each thread has a quad: 4 consecutive
// columns, which it loads at once.

constexpr int HEAD_THREADS = 8, QUAD = 4;
constexpr int LONGEST_HEAD = 128;
// Quads that a thread has of a head, at most.
constexpr int HEAD_QUADS = LONGEST_HEAD / (HEAD_THREADS * QUAD);
constexpr int HEADS_PER_BLOCK = 8;
using Quads = float[HEAD_QUADS][QUAD];

// The number of the thread's head among those that the block has at a time.
static __device__ int head_of_block() { return threadIdx.x / HEAD_THREADS; }
// The first column of one of the thread's quads.
static __device__ int quad_column(int quad) {
    return (quad * HEAD_THREADS + threadIdx.x % HEAD_THREADS) * QUAD;
}

// The sum over the elements of a head. On entry sums[j] is the sum over element j of each of the thread's
// quads. The order of additions is fixed, and all threads of the head get the same bits. All threads of the
// warp call it.
static __device__ float sum_of_head(float (&sums)[QUAD]) {
    for (int distance = HEAD_THREADS / 2; distance > 0; distance /= 2)
        for (float& sum : sums) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}
static __device__ float inverse_rms(float sum_of_squares, const QkNorms& n) {
    return 1 / sqrtf(sum_of_squares / float(n.HS) + n.eps);
}
// The weight of the norm of the head that begins at column `col` of qkv.
template <class Element>
static __device__ PlainView<Element, QUAD> weight_of_head(const QkNorms& n, int64_t col) {
    return {plain_view<Element>(n.weight).data + (col < n.q_cols ? 0 : n.HS)};
}

// out = [rope(norm(q)) | rope(norm(k)) | v], where qkv is [q | k | v]. The output of the norm is rounded
// before it is rotated. RoPE rotates pairs of columns that are half a head apart. Different threads may have
// the two columns of a pair, so they exchange them in shared memory.
template <class Element>
static __global__ void __launch_bounds__(HEADS_PER_BLOCK* HEAD_THREADS)
    qk_norms_and_rope_kernel(QkNorms n, Rope rope, PlainView<Element, QUAD> qkv, PlainView<Element, QUAD> out,
                             uint32_t rows, uint32_t heads) {
    __shared__ __align__(16) float normed[HEADS_PER_BLOCK][LONGEST_HEAD];
    const uint32_t head = blockIdx.x * HEADS_PER_BLOCK + head_of_block(), row = head / heads;
    const int HS = int(n.HS), half = HS / 2;
    const int64_t col = head % heads * n.HS;
    const bool is_v = col >= n.q_cols + n.k_cols;
    auto is_live = [&](int i) { return row < rows && quad_column(i) < HS; };
    const PlainView<Element, QUAD> from = qkv.starting_at(head * n.HS), to = out.starting_at(head * n.HS);
    typename PlainView<Element, QUAD>::StoredChunk loaded[HEAD_QUADS] = {};
    for (int i = 0; i < HEAD_QUADS; i++)
        if (is_live(i)) loaded[i] = from.load(quad_column(i));

    Quads x;
    float squares[QUAD] = {};
    for (int i = 0; i < HEAD_QUADS; i++) {
        from.unpack(loaded[i], x[i]);
        for (int j = 0; j < QUAD; j++) squares[j] = __fmaf_rn(x[i][j], x[i][j], squares[j]);
    }
    const float r = inverse_rms(sum_of_head(squares), n);
    const PlainView<Element, QUAD> weights = weight_of_head<Element>(n, is_v ? 0 : col);
    for (int i = 0; i < HEAD_QUADS; i++) {
        if (!is_live(i) || is_v) continue;
        float weight[QUAD];
        weights.load_values(quad_column(i), weight);
        for (int j = 0; j < QUAD; j++) {
            x[i][j] = float(static_cast<Element>(x[i][j] * r * weight[j]));
            normed[head_of_block()][quad_column(i) + j] = x[i][j];
        }
    }
    __syncwarp();
    for (int i = 0; i < HEAD_QUADS; i++) {
        if (!is_live(i)) continue;
        const bool in_first_half = quad_column(i) < half;
        const int pair = in_first_half ? quad_column(i) : quad_column(i) - half;  // the quad's first pair
        const float2* const table = rope.table + row % uint32_t(rope.T) * half + pair;
        const float* const others = normed[head_of_block()] + (in_first_half ? pair + half : pair);
        for (int j = 0; j < QUAD && !is_v; j++) {  // (x, y) -> (x cos - y sin, y cos + x sin)
            const float sine = in_first_half ? -table[j].y : table[j].y;
            x[i][j] = __fmaf_rn(x[i][j], table[j].x, __fmul_rn(others[j], sine));
        }
        to.store(quad_column(i), x[i], true);
    }
}

// With d = dy weight and xhat = x r: dx = (d - xhat mean(d xhat)) r,  dweight = sum(dy xhat). The eight
// threads of a head have this head in every COLUMN_PARTIALS-th row, and sum up their part of dweight. They
// fetch the next row while they compute one. dqkv holds dy, which becomes dx.
template <class Element>
static __global__ void __launch_bounds__(HEADS_PER_BLOCK* HEAD_THREADS)
    qk_norms_backward_kernel(QkNorms n, PlainView<Element, QUAD> qkv, PlainView<Element, QUAD> dqkv,
                             int64_t rows, int64_t cols, float* partials) {
    const int64_t first_part = int64_t(blockIdx.x) * HEADS_PER_BLOCK;
    const int64_t part = first_part + head_of_block();
    const int64_t col = blockIdx.y * n.HS;
    const int HS = int(n.HS);
    auto is_live = [&](int i) { return quad_column(i) < HS; };
    typename PlainView<Element, QUAD>::StoredChunk loaded_x[HEAD_QUADS] = {}, loaded_dy[HEAD_QUADS] = {};
    auto fetch_row = [&](int64_t row) {
        for (int i = 0; i < HEAD_QUADS; i++) {
            if (row >= rows || !is_live(i)) continue;
            loaded_x[i] = qkv.starting_at(row * cols + col).load(quad_column(i));
            loaded_dy[i] = dqkv.starting_at(row * cols + col).load(quad_column(i));
        }
    };
    const PlainView<Element, QUAD> weights = weight_of_head<Element>(n, col);
    Quads weight = {}, dweight = {};
    for (int i = 0; i < HEAD_QUADS; i++)
        if (is_live(i)) weights.load_values(quad_column(i), weight[i]);

    fetch_row(part);
    // All threads of a warp take part in its sums, even those past the last row.
    for (int64_t first = first_part; first < rows; first += COLUMN_PARTIALS) {
        const int64_t row = first + head_of_block();
        Quads x, dy;
        float squares[QUAD] = {}, products[QUAD] = {};
        for (int i = 0; i < HEAD_QUADS; i++) {
            qkv.unpack(loaded_x[i], x[i]);
            dqkv.unpack(loaded_dy[i], dy[i]);
            for (int j = 0; j < QUAD; j++) {
                squares[j] = __fmaf_rn(x[i][j], x[i][j], squares[j]);
                products[j] = __fmaf_rn(__fmul_rn(dy[i][j], weight[i][j]), x[i][j], products[j]);
            }
        }
        fetch_row(row + COLUMN_PARTIALS);
        const float r = inverse_rms(sum_of_head(squares), n);
        const float mean_d_xhat = sum_of_head(products) * r / float(n.HS);
        for (int i = 0; i < HEAD_QUADS; i++) {
            if (row >= rows || !is_live(i)) continue;
            float dx[QUAD];
            for (int j = 0; j < QUAD; j++) {
                const float xhat = __fmul_rn(x[i][j], r);
                dweight[i][j] = __fmaf_rn(dy[i][j], xhat, dweight[i][j]);
                const float projection = __fmul_rn(xhat, mean_d_xhat);
                dx[j] = __fmul_rn(__fmaf_rn(dy[i][j], weight[i][j], -projection), r);
            }
            dqkv.starting_at(row * cols + col).store(quad_column(i), dx, true);
        }
    }
    float* const sums = partials + (blockIdx.y * COLUMN_PARTIALS + part) * HS;
    for (int i = 0; i < HEAD_QUADS; i++)
        for (int j = 0; j < QUAD && is_live(i); j++) sums[quad_column(i) + j] = dweight[i][j];
}

void qk_norms_and_rope(const QkNorms& n, const Rope& rope, const TensorRef& qkv, const TensorRef& out,
                       cudaStream_t stream) {
    const int64_t heads = qkv.cols / n.HS;
    with_plain_view(qkv, [&](auto x) {
        using Element = typename decltype(x)::ComputeElement;
        launch("qk_norms_and_rope", qk_norms_and_rope_kernel<Element>,
               block_count(qkv.rows * heads, HEADS_PER_BLOCK), HEADS_PER_BLOCK * HEAD_THREADS,
               /*shared_bytes=*/0, stream, n, rope, PlainView<Element, QUAD>{x.data},
               PlainView<Element, QUAD>{static_cast<Element*>(out.data)}, uint32_t(qkv.rows),
               uint32_t(heads));
    });
}
void qk_norms_backward(const QkNorms& n, const TensorRef& qkv, const TensorRef& dqkv,
                       const TensorRef& dweight, float* workspace, cudaStream_t stream) {
    const dim3 grid(COLUMN_PARTIALS / HEADS_PER_BLOCK, block_count(n.q_cols + n.k_cols, n.HS));
    with_plain_view(qkv, [&](auto x) {
        using Element = typename decltype(x)::ComputeElement;
        launch("qk_norms_backward", qk_norms_backward_kernel<Element>, grid, HEADS_PER_BLOCK * HEAD_THREADS,
               /*shared_bytes=*/0, stream, n, PlainView<Element, QUAD>{x.data},
               PlainView<Element, QUAD>{static_cast<Element*>(dqkv.data)}, qkv.rows, qkv.cols, workspace);
    });
    const TensorRef of_q_and_k{.data = dweight.data, .rows = 2, .cols = n.HS, .format = dweight.format};
    reduce_partials(workspace, n.q_cols / n.HS * COLUMN_PARTIALS, row_slice(of_q_and_k, 0, 1), stream);
    reduce_partials(workspace + n.q_cols * COLUMN_PARTIALS, n.k_cols / n.HS * COLUMN_PARTIALS,
                    row_slice(of_q_and_k, 1, 1), stream);
}

}  // namespace coat::gpu
