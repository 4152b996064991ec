// gpu/layers.cu - what any transformer has around its GEMMs, attention and norms: RoPE, norms of heads, the
// loss, sums over rows (gradients of biases), and the embedding's backward pass. The embedding's forward pass
// is a residual add (gpu/norm.cu).
#include <algorithm>
#include <numeric>

#include "device.cuh"

namespace coat::gpu {

// ===========================================================================================================
// RoPE: the pairs (x_i, x_{i + HS/2}) of a head are rotated by the angle position * f_i

// The frequency of pair i: f_i = theta^(-2i / HS), scaled as the model wants it (coat.h, RopeScaling). A part
// of f_i, `kept`, stays; the rest is divided by the scaling's factor. `kept` depends on how many rotations
// f_i makes in the original positions: 0 up to low_freq_factor, 1 from high_freq_factor on, and linear
// between.
static __device__ double rope_frequency(double theta, int i, int half, const RopeScaling& s) {
    const double f = pow(theta, -static_cast<double>(i) / half);
    if (s.type == RopeScaling::Default) return f;
    const double rotations = static_cast<double>(s.original_positions) * f / (2 * 3.14159265358979323846);
    const double range = static_cast<double>(s.high_freq_factor) - s.low_freq_factor;
    const double kept = fmin(fmax((rotations - s.low_freq_factor) / range, 0.0), 1.0);
    return f * (kept + (1 - kept) / s.factor);
}

// table[t, i] is {cos, sin} of the angle t f_i. Angles reach thousands of radians: so they are in double.
static __global__ void rope_table_kernel(int64_t n, int half, double theta, RopeScaling scaling,
                                         float2* table) {
    const int64_t i = thread_of_grid();
    if (i >= n) return;
    const double f = rope_frequency(theta, static_cast<int>(i % half), half, scaling);
    const double angle = static_cast<double>(i / half) * f;
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    table[i] = {static_cast<float>(cosine), static_cast<float>(sine)};
}

// A thread rotates four pairs in each of ROPE_HEADS heads of a row, all heads by the same four angles times
// `sign`. (It has four pairs, not eight, because half a head need not be a multiple of eight.) Heads from
// `rotated_heads` on, which are v, are not rotated; the amax takes them into account.
constexpr int ROPE_HEADS = 8, ROPE_THREADS = 256;
template <class Element>
static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_kernel(Dense<Element, 4> qkv, Rope rope, uint32_t rows, int64_t cols, uint32_t heads, float sign,
                AmaxAndScale* amax) {
    const uint32_t half = static_cast<uint32_t>(rope.HS) / 2, quads = half / 4;
    const uint32_t rotated_heads = static_cast<uint32_t>(rope.rotated_cols / rope.HS);
    const uint32_t i = blockIdx.x * ROPE_THREADS + threadIdx.x, row = i / quads, angle = i % quads * 4;
    const uint32_t first = blockIdx.y * ROPE_HEADS;
    float top = 0;
    if (row < rows) {
        const Dense<Element, 4> at = qkv.from(row * cols + first * rope.HS + angle);
        typename Dense<Element, 4>::Raw raw[ROPE_HEADS][2] = {};
        for (int h = 0; h < ROPE_HEADS; h++) {
            if (first + h >= heads) continue;
            raw[h][0] = at.load(h * rope.HS);
            raw[h][1] = at.load(h * rope.HS + half);
        }
        const float2* const table = rope.table + row % static_cast<uint32_t>(rope.T) * half + angle;
        float cosines[4], sines[4];
        for (int j = 0; j < 4; j += 2) {
            const float4 two = reinterpret_cast<const float4*>(table)[j / 2];
            cosines[j] = two.x;
            cosines[j + 1] = two.z;
            sines[j] = sign * two.y;
            sines[j + 1] = sign * two.w;
        }
        for (int h = 0; h < ROPE_HEADS; h++) {
            if (first + h >= heads) break;
            float x[4], y[4];
            at.values(raw[h][0], x);
            at.values(raw[h][1], y);
            if (first + h < rotated_heads) {
                for (int j = 0; j < 4; j++) rotate(x[j], y[j], cosines[j], sines[j]);
                at.round_in_place_and_store(h * rope.HS, x, true);
                at.round_in_place_and_store(h * rope.HS + half, y, true);
            }
            if (amax) top = larger_magnitude(larger_magnitude(top, x), y);
        }
    }
    if (amax) update_amax_by_warp(&amax->amax, magnitude_bits(top));
}

void rope(const Rope& r, const View& qkv, bool inverse, AmaxAndScale* amax, cudaStream_t s) {
    const int64_t quads = qkv.rows * r.HS / 8, heads = (amax ? qkv.cols : r.rotated_cols) / r.HS;
    const dim3 grid(blocks(quads, ROPE_THREADS), blocks(heads, ROPE_HEADS));
    with_dense(qkv, [&](auto x) {
        using Element = typename decltype(x)::Compute;
        launch("rope", rope_kernel<Element>, grid, ROPE_THREADS, 0, s, Dense<Element, 4>{x.data}, r,
               static_cast<uint32_t>(qkv.rows), qkv.cols, static_cast<uint32_t>(heads), inverse ? -1 : 1,
               amax);
    });
}

void rope_table(const ModelConfig& c, int64_t positions, float2* table, cudaStream_t s) {
    const int64_t half = c.HS() / 2;
    launch("rope_table", rope_table_kernel, blocks(positions * half, 256), 256, 0, s, positions * half,
           static_cast<int>(half), c.rope_theta, c.rope_scaling, table);
}

// ===========================================================================================================
// Norms of heads (Qwen3): y = x r weight with r = 1 / rms(x), for each head of q and of k

// A warp has a head of a row. A lane has the columns lane, lane + 32, ... of the head.
constexpr int HEAD_WARPS = 8, LONGEST_HEAD = 128;
template <class Element>
static __global__ void __launch_bounds__(32 * HEAD_WARPS)
    head_norm_forward_kernel(HeadNorm n, Element* qkv, int64_t rows, int64_t cols) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * HEAD_WARPS + threadIdx.x / 32;
    const int64_t col = blockIdx.y * n.HS;
    if (row >= rows) return;  // the whole warp
    const Element* const weight = static_cast<const Element*>(n.weight) + (col < n.q_cols ? 0 : n.HS);
    Element* const x = qkv + row * cols + col;
    float squares = 0;
    for (int i = threadIdx.x % 32; i < n.HS; i += 32) {
        const float value = x[i];
        squares += value * value;
    }
    const float r = 1 / sqrtf(sum_of_warp(squares) / static_cast<float>(n.HS) + n.eps);
    for (int i = threadIdx.x % 32; i < n.HS; i += 32) {
        const float value = x[i], w = weight[i];
        x[i] = static_cast<Element>(value * r * w);
    }
}

// With d = dy weight: dx = (d - x r mean(d x r)) r,  dweight = sum(dy x r). A warp has a head of every
// COLUMN_PARTIALS-th row, and sums up its part of dweight.
template <class Element>
static __global__ void __launch_bounds__(32 * HEAD_WARPS)
    head_norm_backward_kernel(HeadNorm n, const Element* qkv, Element* dqkv, int64_t rows, int64_t cols,
                              float* partials) {
    __shared__ float sums[HEAD_WARPS][LONGEST_HEAD];
    const int64_t part = static_cast<int64_t>(blockIdx.x) * HEAD_WARPS + threadIdx.x / 32;
    const int64_t col = blockIdx.y * n.HS;
    const Element* const weight = static_cast<const Element*>(n.weight) + (col < n.q_cols ? 0 : n.HS);
    const float size = static_cast<float>(n.HS);
    const int lane = threadIdx.x % 32;
    float* const dweight = sums[threadIdx.x / 32];
    for (int i = lane; i < n.HS; i += 32) dweight[i] = 0;
    for (int64_t row = part; row < rows; row += COLUMN_PARTIALS) {
        const Element* const x = qkv + row * cols + col;
        Element* const g = dqkv + row * cols + col;  // dy, which becomes dx
        float squares = 0, products = 0;
        for (int i = lane; i < n.HS; i += 32) {
            const float value = x[i], dy = g[i], w = weight[i];
            squares += value * value;
            products += dy * w * value;
        }
        const float r = 1 / sqrtf(sum_of_warp(squares) / size + n.eps);
        const float mean_d_normal = sum_of_warp(products) * r / size;
        for (int i = lane; i < n.HS; i += 32) {
            const float value = x[i], dy = g[i], w = weight[i], normal = value * r;
            dweight[i] += dy * normal;
            g[i] = static_cast<Element>((dy * w - normal * mean_d_normal) * r);
        }
    }
    for (int i = lane; i < n.HS; i += 32)
        partials[(blockIdx.y * COLUMN_PARTIALS + part) * n.HS + i] = dweight[i];
}

void head_norm_forward(const HeadNorm& n, const View& qkv, cudaStream_t s) {
    const dim3 grid(blocks(qkv.rows, HEAD_WARPS), blocks(n.q_cols + n.k_cols, n.HS));
    with_dense(qkv, [&](auto x) {
        launch("head_norm_forward", head_norm_forward_kernel<typename decltype(x)::Compute>, grid,
               32 * HEAD_WARPS, 0, s, n, x.data, qkv.rows, qkv.cols);
    });
}
void head_norm_backward(const HeadNorm& n, const View& qkv, const View& dqkv, const View& dweight,
                        float* workspace, cudaStream_t s) {
    const dim3 grid(COLUMN_PARTIALS / HEAD_WARPS, blocks(n.q_cols + n.k_cols, n.HS));
    with_dense(qkv, [&](auto x) {
        using Element = typename decltype(x)::Compute;
        launch("head_norm_backward", head_norm_backward_kernel<Element>, grid, 32 * HEAD_WARPS, 0, s, n,
               x.data, static_cast<Element*>(dqkv.data), qkv.rows, qkv.cols, workspace);
    });
    const View each{dweight.data, nullptr, 2, n.HS, dweight.quant};
    reduce_partials(workspace, n.q_cols / n.HS * COLUMN_PARTIALS, rows(each, 0, 1), s);
    reduce_partials(workspace + n.q_cols * COLUMN_PARTIALS, n.k_cols / n.HS * COLUMN_PARTIALS,
                    rows(each, 1, 1), s);
}

// ===========================================================================================================
// Cross-entropy

namespace {

// What a part of a row contributes to the softmax's denominator, computed in one pass: the part's maximum
// `top`, and the sum of exp(x - top). Two parts are merged by rescaling the sum whose maximum is smaller.
struct Softmax {
    float top, sum;
    __device__ void merge(const Softmax& o) {
        const float t = fmaxf(top, o.top);
        sum = sum * factor(top, t) + o.sum * factor(o.top, t);
        top = t;
    }
    static __device__ float factor(float from, float to) {
        return from == to ? 1.0f : fast_exp2((from - to) * LOG2_E);
    }
};

}  // namespace

constexpr int LOSS_THREADS = 512;
// Merges the parts of all threads: first within each warp, then the warps in order. Every thread gets the
// same bits.
static __device__ Softmax block_softmax(Softmax mine) {
    __shared__ Softmax parts[LOSS_THREADS / 32];
    for (int lanes = 16; lanes > 0; lanes /= 2)
        mine.merge({__shfl_down_sync(~0u, mine.top, lanes), __shfl_down_sync(~0u, mine.sum, lanes)});
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
    __syncthreads();
    Softmax all{-INFINITY, 0};
    for (const Softmax& of_warp : parts) all.merge(of_warp);
    return all;
}

// A block has one token. It reads the row of logits twice: for the loss, and for the gradients. CACHED: in
// the first pass each thread leaves its logits in shared memory, where it finds them in the second. A row
// that is too long for that is read from memory, or the L2 cache, again.
template <class Element, bool CACHED>
static __global__ void __launch_bounds__(LOSS_THREADS, sizeof(Element) < 4 ? 3 : 2)
    cross_entropy_kernel(Dense<Element> logits, int64_t stride, int64_t V, const int32_t* targets,
                         bool gradients, const double* loss_weight, float* losses) {
    using Raw = typename Dense<Element>::Raw;
    extern __shared__ __align__(16) unsigned char shared[];  // (stride) Element
    Raw* const cached = reinterpret_cast<Raw*>(shared);
    const int64_t row = blockIdx.x, first = row * stride;
    const int32_t target = targets[row];
    if (target == NO_TARGET) {  // the whole block
        if (threadIdx.x == 0) losses[row] = 0;
        Values zeros = {};
        for (int64_t col = threadIdx.x * CHUNK; gradients && col < stride; col += LOSS_THREADS * CHUNK)
            logits.round_in_place_and_store(first + col, zeros, true);
        return;
    }
    const float correct = logits.data[first + target];
    constexpr int STEP = LOSS_THREADS * CHUNK, IN_FLIGHT = 4;
    const int live = static_cast<int>(V);
    auto mask = [&](int col, Values& x, float with) {  // columns beyond the vocabulary
        if (col + CHUNK <= live) return;
        for (int j = 0; j < CHUNK; j++) x[j] = col + j < live ? x[j] : with;
    };
    Softmax mine{-INFINITY, 0};
    for (int begin = threadIdx.x * CHUNK; begin < live; begin += IN_FLIGHT * STEP) {
        Raw raw[IN_FLIGHT];
        for (int i = 0; i < IN_FLIGHT; i++)
            if (begin + i * STEP < live) raw[i] = logits.load(first + begin + i * STEP);
        for (int i = 0; i < IN_FLIGHT; i++) {
            const int col = begin + i * STEP;
            if (col >= live) break;
            if (CACHED) cached[col / CHUNK] = raw[i];
            Values x;
            logits.values(raw[i], x);
            mask(col, x, -INFINITY);
            float top = x[0];
            for (int j = 1; j < CHUNK; j++) top = fmaxf(top, x[j]);
            if (top > mine.top) mine.merge({top, 0.0f});
            const float offset = -mine.top * LOG2_E;
            for (int j = 0; j < CHUNK; j++) mine.sum += fast_exp2(__fmaf_rn(x[j], LOG2_E, offset));
        }
    }
    const Softmax all = block_softmax(mine);
    const float lse = all.top + logf(all.sum), offset = -lse * LOG2_E;
    if (threadIdx.x == 0) losses[row] = lse - correct;
    if (!gradients) return;
    const float weight = static_cast<float>(*loss_weight);
    // (softmax - one_hot(target)) * weight
#pragma unroll 4
    for (int col = threadIdx.x * CHUNK; col < static_cast<int>(stride); col += STEP) {
        Values x = {};
        if (col < live) logits.values(CACHED ? cached[col / CHUNK] : logits.load(first + col), x);
        for (int j = 0; j < CHUNK; j++) x[j] = fast_exp2(__fmaf_rn(x[j], LOG2_E, offset)) * weight;
        if (target >= col && target < col + CHUNK)
            for (int j = 0; j < CHUNK; j++) x[j] -= col + j == target ? weight : 0.0f;
        mask(col, x, 0.0f);
        logits.round_in_place_and_store(first + col, x, true);
    }
}

// A single block adds up the losses, because a step has few, and the order must not depend on the GPU.
constexpr int SUM_THREADS = 1024;
static __global__ void __launch_bounds__(SUM_THREADS)
    loss_sum_kernel(const float* losses, int64_t n, const double* loss_weight, double* total) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += SUM_THREADS) sum += losses[i];
    sum = block_sum<SUM_THREADS>(sum);
    if (threadIdx.x == 0) *total += *loss_weight * sum;
}

static void launch_cross_entropy(const View& logits, int64_t V, const int32_t* targets, bool gradients,
                                 const double* loss_weight, float* losses, cudaStream_t s) {
    with_dense(logits, [&](auto x) {
        using Element = typename decltype(x)::Compute;
        const int row = static_cast<int>(logits.cols * sizeof(Element));
        const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10);
        const bool cached = row <= limit - 2048;  // beside the block's sums
        const auto kernel =
            cached ? cross_entropy_kernel<Element, true> : cross_entropy_kernel<Element, false>;
        launch("cross_entropy", kernel, static_cast<unsigned>(logits.rows), LOSS_THREADS, cached ? row : 0, s,
               x, logits.cols, V, targets, gradients, loss_weight, losses);
    });
}
void cross_entropy_forward(const View& logits, int64_t V, const int32_t* targets, float* losses,
                           cudaStream_t s) {
    launch_cross_entropy(logits, V, targets, /*gradients=*/false, /*loss_weight=*/nullptr, losses, s);
}
void cross_entropy(const View& logits, int64_t V, const int32_t* targets, const double* loss_weight,
                   float* losses, cudaStream_t s) {
    launch_cross_entropy(logits, V, targets, /*gradients=*/true, loss_weight, losses, s);
}

void loss_sum(const float* losses, int64_t n, const double* loss_weight, double* total, cudaStream_t s) {
    launch("loss_sum", loss_sum_kernel, 1, SUM_THREADS, 0, s, losses, n, loss_weight, total);
}

// ===========================================================================================================
// Sums over rows, in two stages: a block adds up some of the rows; then these sums are added up, in order

// Stage one: a block adds up every COLUMN_PARTIALS-th tile of 128 columns, and takes the amax in passing.
// Three blocks are resident: the sums need registers beside those of a tile's rows.
constexpr int COLUMN_BLOCKS_PER_SM = 3;
template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS, COLUMN_BLOCKS_PER_SM)
    column_sums_kernel(Producer x, int64_t rows, float* partials, AmaxAndScale* amax) {
    constexpr int PLANES = Producer::PLANES;
    __shared__ float sums[SIDE_THREADS][TILE + 1];
    const TilePlace at;
    Values sum[PLANES] = {};
    float top = 0;
    for (int64_t tile = blockIdx.y; tile * TILE < rows; tile += COLUMN_PARTIALS)
        for_each_row(x, TilePlace(tile), rows, [&](int, const Values(&v)[PLANES], bool live) {
            for (int p = 0; p < PLANES; p++)
                for (int j = 0; j < CHUNK; j++) {
                    if (live) sum[p][j] += v[p][j];
                    top = larger_magnitude(top, v[p][j]);
                }
        });
    if (amax) update_amax_by_warp(&amax->amax, magnitude_bits(top));
    combine_columns(
        x, at, sum, sums, [](float a, float b) { return a + b; },
        [&](int64_t col, float total) {
            partials[static_cast<int64_t>(blockIdx.y) * PLANES * x.width + col] = total;
        });
}

// Stage two. A block has 32 columns: thread (x, y) adds the rows y, y + 16, ...; then the 16 sums are added.
constexpr int REDUCE_ROWS = 16;
static __global__ void __launch_bounds__(32 * REDUCE_ROWS)
    reduce_partials_kernel(const float* partials, int64_t rows, int64_t cols, EitherDense gradient) {
    __shared__ float sums[REDUCE_ROWS][32];
    const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
    float sum = 0;
    if (col < cols)
#pragma unroll 8
        for (int64_t i = threadIdx.y; i < rows; i += REDUCE_ROWS) sum += partials[i * cols + col];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || col >= cols) return;
    float total = 0;
    for (int i = 0; i < REDUCE_ROWS; i++) total += sums[i][threadIdx.x];
    gradient.with([&](auto x) {
        const float before = x.data[col];
        x.data[col] = static_cast<typename decltype(x)::Compute>(before + total);
    });
}

void reduce_partials(const float* partials, int64_t rows, const View& gradient, cudaStream_t s) {
    const int64_t n = gradient.rows * gradient.cols;
    launch("reduce_partials", reduce_partials_kernel, blocks(n, 32), dim3(32, REDUCE_ROWS), 0, s, partials,
           rows, n, either_dense(gradient));
}

void column_sums(const Lazy& x, const View& gradient, float* workspace, AmaxAndScale* amax, cudaStream_t s) {
    with_producer(x, [&](auto producer) {
        const dim3 grid(blocks(producer.width, TILE), COLUMN_PARTIALS);
        launch("column_sums", column_sums_kernel<decltype(producer)>, grid, TILE_THREADS, 0, s, producer,
               x.rows, workspace, amax);
    });
    reduce_partials(workspace, COLUMN_PARTIALS, gradient, s);
}

// ===========================================================================================================
// Embedding, backward

EmbeddingOrder embedding_order(const int32_t* tokens, int64_t N) {
    EmbeddingOrder out;
    out.order.resize(N);
    std::iota(out.order.begin(), out.order.end(), 0);
    std::stable_sort(out.order.begin(), out.order.end(),
                     [&](int32_t a, int32_t b) { return tokens[a] < tokens[b]; });
    for (int32_t i = 0; i < N; i++) {
        const int32_t token = tokens[out.order[i]];
        if (i == 0 || token != out.tokens.back().token) out.tokens.push_back({token, i, 0});
        out.tokens.back().count++;
    }
    // The longest sums start first.
    std::stable_sort(out.tokens.begin(), out.tokens.end(),
                     [](const TokenRows& a, const TokenRows& b) { return a.count > b.count; });
    return out;
}

// Each thread of a block has CHUNK columns. A block has one token, whose rows are given by `order`; or one
// position t of every `period`: rows t, t + period, ... of g, one of each sequence, in order. Each warp of a
// token's block adds up a run of rows, then the first warp adds these sums, and so on: a token that is half
// of the text must not keep the GPU waiting.
constexpr int COLUMN_THREADS = 32, RUNS = 8, RUN_ROWS = 32;
static __global__ void __launch_bounds__(RUNS* COLUMN_THREADS)
    embedding_backward_kernel(EitherDense g, int N, int64_t C, const int32_t* order, const TokenRows* tokens,
                              int period, EitherDense gradient) {
    __shared__ Values sums[RUNS][COLUMN_THREADS];
    const int t = blockIdx.x;
    const int64_t col = (static_cast<int64_t>(blockIdx.y) * COLUMN_THREADS + threadIdx.x) * CHUNK;
    const TokenRows rows =
        tokens ? tokens[t] : TokenRows{t, 0, static_cast<int32_t>(ceil_div(N - t, period))};
    const int run = tokens ? RUN_ROWS : rows.count, warps = blockDim.y;
    Values total = {};
    for (int first = 0; first < rows.count; first += warps * run) {
        const int begin = first + threadIdx.y * run, n = col < C ? min(run, rows.count - begin) : 0;
        Values sum = {};
#pragma unroll 8
        for (int i = begin; i < begin + n; i++) {
            const int64_t row = tokens ? order[rows.first + i] : i * period + t;
            Values v;
            g.load_values(row * C + col, v);
            for (int j = 0; j < CHUNK; j++) sum[j] += v[j];
        }
        for (int j = 0; j < CHUNK; j++) sums[threadIdx.y][threadIdx.x][j] = sum[j];
        __syncthreads();
        const int runs = min(warps, static_cast<int>(ceil_div(rows.count - first, run)));
        for (int r = 0; threadIdx.y == 0 && r < runs; r++)
            for (int j = 0; j < CHUNK; j++) total[j] += sums[r][threadIdx.x][j];
        __syncthreads();
    }
    if (threadIdx.y != 0 || col >= C) return;
    Values sum;
    gradient.load_values(rows.token * C + col, sum);
    for (int j = 0; j < CHUNK; j++) sum[j] += total[j];
    gradient.round_in_place_and_store(rows.token * C + col, sum, true);
}

void embedding_backward(const View& g, const int32_t* order, const TokenRows* tokens, int64_t count,
                        const View& gradient, cudaStream_t s) {
    const int64_t n = tokens ? count : std::min(count, g.rows);
    const dim3 grid(static_cast<unsigned>(n), blocks(g.cols, COLUMN_THREADS * CHUNK));
    launch("embedding_backward", embedding_backward_kernel, grid, dim3(COLUMN_THREADS, tokens ? RUNS : 1), 0,
           s, either_dense(g), g.rows, g.cols, order, tokens, count, either_dense(gradient));
}

}  // namespace coat::gpu
