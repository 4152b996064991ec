// gpu/layers.cu - residual + norm, RoPE, cross-entropy and embedding on the GPU (interface: layers.cuh; how
// tensors are read and written: tensor.cuh).
#include "layers.cuh"

namespace coat::gpu {
namespace {

// Loops over the values of a chunk have eight turns: nvcc unrolls them without a pragma.

// ===========================================================================================================
// Rows: one warp or several hold a row in registers, up to ROW_CHUNKS chunks a thread. A block has one row at
// a time, or several: threadIdx.y is the row's number, threadIdx.x the thread's number within the row.

constexpr int ROW_CHUNKS = 4, ROW_WARPS = 16;  // warps of a block, at most

// As few warps as hold a row of C columns; several rows in a block where a row is short.
dim3 row_block(int64_t C) {
    const int64_t warps = ceil_div(C, 32 * CHUNK * ROW_CHUNKS);
    require(C % 16 == 0 && warps <= ROW_WARPS, "a hidden size is not a multiple of 16 or is above 16384");
    return {static_cast<unsigned>(32 * warps), static_cast<unsigned>(std::max<int64_t>(1, 4 / warps))};
}
__device__ int64_t row_column(int chunk) { return (int64_t(chunk) * blockDim.x + threadIdx.x) * CHUNK; }

// Sums over the threads of a row in a fixed order; all of them get the same bits. All threads of the block
// call it. Two successive calls need different PLACEs in shared memory, because a thread may still be reading
// the first when another writes the second.
template <int PLACE, int K>
__device__ void row_sum(float (&x)[K]) {
    __shared__ float parts[K][ROW_WARPS];
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) x[k] += __shfl_xor_sync(0xFFFFFFFFu, x[k], lanes);
    const int warps = blockDim.x / 32, first = threadIdx.y * warps;
    if (warps == 1) return;
    if (threadIdx.x % 32 == 0)
#pragma unroll
        for (int k = 0; k < K; k++) parts[k][first + threadIdx.x / 32] = x[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; k++) {
        x[k] = 0;
        for (int w = 0; w < warps; w++) x[k] += parts[k][first + w];
    }
}

__device__ float inverse_root(float squares, int64_t C, float eps) {  // 1 / sqrt(squares / C + eps)
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, static_cast<float>(C)), eps)));
}

// {mean, 1 / std} of a row, or {0, 1 / rms}. Forward and backward have the same chunks in the same threads:
// the same bits.
__device__ float2 row_stats(const Values (&x)[ROW_CHUNKS], int64_t C, bool rms, float eps) {
    float sum[1] = {0};
    if (!rms) {
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c++)
            for (int j = 0; j < CHUNK; j++) sum[0] += x[c][j];
        row_sum<0>(sum);
    }
    const float mean = __fdiv_rn(sum[0], static_cast<float>(C));
    float square[1] = {0};
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; c++)
        for (int j = 0; j < CHUNK; j++) {
            const float d = row_column(c) < C ? __fsub_rn(x[c][j], mean) : 0.0f;
            square[0] = __fmaf_rn(d, d, square[0]);
        }
    row_sum<1>(square);
    return {mean, inverse_root(square[0], C, eps)};
}

// ===========================================================================================================
// Residual and norm, forward

// What is added. residual_add: x + y by rows (N, C), the residual stream and a branch. embedding_forward:
// x[token] + y[position].
template <class Compute>
struct Addends {
    Dense<Compute> x, y;          // y may be no tensor
    const int32_t* tokens;  // (N); null: rows of x and y have the same number
    int64_t T, rows, C;     // the position of a row is row % T
};

// Writes the sum to x_out and to the norm's input. Leaves what the next GEMM's quantizer needs: the norm's
// statistics and the amax of its output.
template <class Storage, bool READS_SAVED, class T = typename Storage::Compute>
__global__ void __launch_bounds__(32 * ROW_WARPS)
    residual_kernel(Addends<T> a, Dense<T> x_out, Storage in, NormParameters<T> parameters, float2* stats,
                    bool rms, float eps, AmaxAndScale* y_amax) {
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, C = a.C;
    const int64_t x_row = a.tokens && row < a.rows ? a.tokens[row] : row,
                  y_row = a.tokens ? uint32_t(row) % uint32_t(a.T) : row;
    typename Dense<T>::Raw raw_x[ROW_CHUNKS] = {}, raw_y[ROW_CHUNKS] = {};
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; c++) {
        if (row >= a.rows || row_column(c) >= C) continue;
        raw_x[c] = a.x.load(x_row * C + row_column(c));
        if (a.y.data) raw_y[c] = a.y.load(y_row * C + row_column(c));
    }
    Values v[ROW_CHUNKS] = {};
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; c++) {
        const int64_t col = row_column(c), i = row * C + col;
        const bool live = row < a.rows && col < C;
        Values sum, y;
        a.x.values(raw_x[c], sum);
        a.y.values(raw_y[c], y);
        if (a.y.data)
            for (int j = 0; j < CHUNK; j++) sum[j] = __fadd_rn(sum[j], y[j]);
        for (int j = 0; j < CHUNK; j++) v[c][j] = sum[j];
        if (x_out.data) x_out.round_and_store(i, sum, live);
        in.round_and_store(i, v[c], live);  // v becomes what is saved; and sum is what x_out holds
        if (!READS_SAVED)
            for (int j = 0; j < CHUNK; j++) v[c][j] = sum[j];
    }
    const float2 st = row_stats(v, C, rms, eps);
    if (row < a.rows && threadIdx.x == 0) stats[row] = st;
    if (!y_amax) return;
    uint32_t top = 0;
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; c++) {
        if (row >= a.rows || row_column(c) >= C) continue;
        Values weight, bias;
        parameters.load(row_column(c), weight, bias);
        for (int j = 0; j < CHUNK; j++)
            top = max(top, magnitude(normalized(v[c][j], st, weight[j], bias[j])));
    }
    update_amax_by_warp(&y_amax->amax, top);
}

void launch_residual(const View& x, const View& y, const int32_t* tokens, int64_t T, const View& x_out,
                     const Norm& n, bool reads_saved, AmaxAndScale* y_amax, cudaStream_t s) {
    const int64_t rows = n.in.rows, C = n.in.cols;
    if (rows == 0) return;
    require(reads_saved || in_groups(n.in.quant), "only groups differ from the residual stream");
    const dim3 block = row_block(C);
    with_storage(n.in, [&](auto in) {
        using F = typename decltype(in)::Compute;
        const Addends<F> sum{dense<F>(x.data), dense<F>(y.data), tokens, T, rows, C};
        const NormParameters<F> parameters{dense<F>(n.weight), dense<F>(n.bias)};
        auto kernel = residual_kernel<decltype(in), true>;
        if constexpr (std::is_same_v<decltype(in), Groups>)
            if (!reads_saved) kernel = residual_kernel<Groups, false>;
        launch("residual", kernel, blocks(rows, block.y), block, 0, s, sum, dense<F>(x_out.data), in,
               parameters, n.stats, n.rms, n.eps, y_amax);
    });
}

}  // namespace

void residual_add(const View& x, const View& branch, const View& x_out, const Norm& next, bool reads_saved,
                  AmaxAndScale* y_amax, cudaStream_t s) {
    launch_residual(x, branch, nullptr, 1, x_out, next, reads_saved, y_amax, s);
}
void embedding_forward(const int32_t* tokens, const View& embedding, const View& positions, int64_t T,
                       const View& x_out, const Norm& next, bool reads_saved, AmaxAndScale* y_amax,
                       cudaStream_t s) {
    launch_residual(embedding, positions, tokens, T, x_out, next, reads_saved, y_amax, s);
}

// ===========================================================================================================
// Norm, backward. With xhat = (x - mean) / std and d = dy * weight:
//   LayerNorm  dx = (d - mean(d) - xhat mean(d xhat)) / std
//   RMSNorm    dx = (d - xhat mean(d xhat)) / rms, with xhat = x / rms
//   both       dweight += dy xhat, dbias += dy
// A block goes through many rows and sums dweight and dbias in shared memory; the blocks' sums are then added
// in order.

namespace {

// A thread's own columns of a parameter gradient, in shared memory. The two halves of a chunk lie apart, so
// that neighbouring threads use different banks.
struct ColumnSums {
    float4* sums;
    int64_t apart;  // from the first half of a chunk to the second
    __device__ ColumnSums(float* sums, int64_t C) : sums(reinterpret_cast<float4*>(sums)), apart(C / CHUNK) {}
    __device__ void zero(int64_t col) const { sums[col / CHUNK] = sums[col / CHUNK + apart] = float4{}; }
    __device__ void add(int64_t col, const Values& v) const {
        float4 &a = sums[col / CHUNK], &b = sums[col / CHUNK + apart];
        a = {a.x + v[0], a.y + v[1], a.z + v[2], a.w + v[3]};
        b = {b.x + v[4], b.y + v[5], b.z + v[6], b.w + v[7]};
    }
    __device__ void read(int64_t col, Values& v) const {
        const float4 a = sums[col / CHUNK], b = sums[col / CHUNK + apart];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
};

// The sums of a block's threadIdx.y, added in order, to row blockIdx.x of partials (blocks, C).
__device__ void write_partials(float* sums, int64_t C, Dense<float> partials) {
    for (int64_t col = (threadIdx.y * blockDim.x + threadIdx.x) * CHUNK; col < C;
         col += blockDim.x * blockDim.y * CHUNK) {
        Values total = {}, one;
        for (int y = 0; y < blockDim.y; y++) {
            ColumnSums(sums + y * C, C).read(col, one);
            for (int j = 0; j < CHUNK; j++) total[j] += one[j];
        }
        partials.round_and_store(blockIdx.x * C + col, total, true);
    }
}

template <class Storage>
struct NormBackward {  // the arguments of the kernel
    using T = typename Storage::Compute;
    Storage in;
    Dense<T> weight, dy, g_in, g_out;
    int64_t rows, C;
    float eps;
    float2* stats;
    AmaxAndScale* g_amax;
    float* partials;
};

// What a thread holds of one row: chunks as they are loaded. The residual gradient is loaded early, with the
// rest, unless FP32 rows leave no registers for it.
template <class Storage>
struct BackwardRow {
    using T = typename Storage::Compute;
    static constexpr bool EARLY = sizeof(T) < 4;
    const NormBackward<Storage>& a;
    int64_t row, first;  // element of the thread's first chunk
    typename Storage::Raw raw_x[ROW_CHUNKS] = {};
    typename Dense<T>::Raw raw_dy[ROW_CHUNKS] = {}, raw_g[ROW_CHUNKS] = {};

    __device__ BackwardRow(const NormBackward<Storage>& a, int64_t row)
        : a(a), row(row), first(row * a.C + threadIdx.x * CHUNK) {
        const Storage x = a.in.from(first);
        const Dense<T> dy = a.dy.from(first), g = a.g_in.from(first);
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c++) {
            if (!live(c)) continue;
            raw_x[c] = x.load(offset(c));
            raw_dy[c] = dy.load(offset(c));
            if (EARLY && a.g_in.data) raw_g[c] = g.load(offset(c));
        }
    }
    __device__ bool live(int c) const { return row < a.rows && row_column(c) < a.C; }
    __device__ uint32_t offset(int c) const { return c * blockDim.x * CHUNK; }
    __device__ void x(int c, Values& v) const { a.in.values(raw_x[c], v); }
    __device__ void dy_and_weight(int c, Values& d, Values& w) const {
        a.dy.values(raw_dy[c], d);
        a.weight.values(a.weight.load(row_column(c)), w);
    }
    __device__ void g(int c, Values& v) {
        if (!EARLY && a.g_in.data) raw_g[c] = a.g_in.from(first).load(offset(c));
        a.g_in.values(raw_g[c], v);
    }
    __device__ void store(int c, Values& v, float& top) const {
        a.g_out.round_and_store(first + offset(c), v, true);
        for (int j = 0; j < CHUNK; j++) top = larger_magnitude(top, v[j]);
    }
};

template <class Storage, bool RMS>
__global__ void __launch_bounds__(32 * ROW_WARPS) norm_backward_kernel(const NormBackward<Storage> a) {
    extern __shared__ __align__(16) float sums[];  // (blockDim.y, C): dweight; behind it, of LayerNorm: dbias
    const ColumnSums dweight(sums + threadIdx.y * a.C, a.C),
        dbias(sums + (blockDim.y + threadIdx.y) * a.C, a.C);
#pragma unroll
    for (int c = 0; c < ROW_CHUNKS; c++) {
        if (row_column(c) >= a.C) continue;
        dweight.zero(row_column(c));
        if (!RMS) dbias.zero(row_column(c));
    }
    const float per_column = __fdiv_rn(1.0f, static_cast<float>(a.C));
    float top = 0;
    bool turn = false;
    for (int64_t first = int64_t(blockIdx.x) * blockDim.y; first < a.rows;
         first += int64_t(gridDim.x) * blockDim.y, turn = !turn) {
        BackwardRow<Storage> r(a, first + threadIdx.y);
        Values x[ROW_CHUNKS];
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c++) r.x(c, x[c]);
        float2 st{};
        if (!RMS) st = row_stats(x, a.C, false, a.eps);
        // LayerNorm: of d, and of d xhat. RMSNorm: of x^2, and of d x. There mean(d xhat) = mean(d x) / rms,
        // so that the threads of a row exchange both sums at once.
        float sum[2] = {0, 0};
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c++) {
            if (!r.live(c)) continue;
            Values d, w;
            r.dy_and_weight(c, d, w);
            for (int j = 0; j < CHUNK; j++) {
                if (!RMS) x[c][j] = (x[c][j] - st.x) * st.y;
                const float dw = d[j] * w[j];
                sum[0] = RMS ? __fmaf_rn(x[c][j], x[c][j], sum[0]) : sum[0] + dw;
                sum[1] += dw * x[c][j];
            }
        }
        if (RMS && turn) row_sum<1>(sum);  // two places in turn
        else row_sum<2>(sum);
        if (RMS) st.y = inverse_root(sum[0], a.C, a.eps);
        if (r.row < a.rows && threadIdx.x == 0) a.stats[r.row] = st;
        const float mean = sum[0] * per_column, mean_xhat = sum[1] * per_column * (RMS ? st.y : 1.0f);
#pragma unroll
        for (int c = 0; c < ROW_CHUNKS; c++) {
            if (!r.live(c)) continue;
            Values d, w, g;
            r.dy_and_weight(c, d, w);
            r.g(c, g);
            if (!RMS) dbias.add(row_column(c), d);
            for (int j = 0; j < CHUNK; j++) {
                const float xhat = RMS ? x[c][j] * st.y : x[c][j], dw = d[j] * w[j];
                g[j] += st.y * ((RMS ? dw : dw - mean) - xhat * mean_xhat);
                d[j] *= xhat;
            }
            dweight.add(row_column(c), d);
            r.store(c, g, top);
        }
    }
    if (a.g_amax) update_amax_by_warp(&a.g_amax->amax, magnitude(top));
    __syncthreads();
    write_partials(sums, a.C, {a.partials});
    if (!RMS) write_partials(sums + blockDim.y * a.C, a.C, {a.partials + gridDim.x * a.C});
}

// The second stage of a sum over rows: the partial sums of blocks, in order. A block has 32 columns: thread
// (x, y) adds the rows y, y + 16, ...; then the 16 sums are added in order.
constexpr int REDUCE_ROWS = 16;
__global__ void __launch_bounds__(32 * REDUCE_ROWS)
    reduce_partials_kernel(const float* partials, int64_t rows, int64_t cols, EitherDense gradient) {
    __shared__ float sums[REDUCE_ROWS][32];
    const int64_t col = int64_t(blockIdx.x) * 32 + threadIdx.x;
    float sum = 0;
    if (col < cols)
#pragma unroll 8
        for (int64_t i = threadIdx.y; i < rows; i += REDUCE_ROWS) sum += partials[i * cols + col];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || col >= cols) return;
    float total = 0;
    for (int i = 0; i < REDUCE_ROWS; i++) total += sums[i][threadIdx.x];
    gradient.add(col, total);
}

// A fixed number of blocks for a GPU: it decides in which order dweight and dbias are summed.
constexpr int NORM_BLOCKS_PER_SM = 4;

}  // namespace

void reduce_partials(const float* partials, int64_t rows, const View& gradient, cudaStream_t s) {
    const int64_t n = gradient.rows * gradient.cols;
    launch("reduce_partials", reduce_partials_kernel, blocks(n, 32), dim3(32, REDUCE_ROWS), 0, s, partials,
           rows, n, either_dense(gradient));
}

size_t norm_backward_workspace(int64_t C) {
    return size_t(2) * multiprocessors() * NORM_BLOCKS_PER_SM * C * sizeof(float);
}

void norm_backward(const Norm& n, const View& dy, const View& g_in, const View& g_out, AmaxAndScale* g_amax,
                   const View& dweight, const View& dbias, float* workspace, cudaStream_t s) {
    const int64_t rows = n.in.rows, C = n.in.cols;
    if (rows == 0) return;
    const dim3 block = row_block(C);
    const unsigned grid = std::min(blocks(rows, block.y), unsigned(multiprocessors() * NORM_BLOCKS_PER_SM));
    const int shared = static_cast<int>((n.rms ? 1 : 2) * block.y * C * sizeof(float));
    with_storage(n.in, [&](auto in) {
        using Storage = decltype(in);
        using T = typename Storage::Compute;
        const NormBackward<Storage> a{in, dense<T>(n.weight), dense<T>(dy.data), dense<T>(g_in.data),
                                      dense<T>(g_out.data), rows, C, n.eps, n.stats, g_amax, workspace};
        const auto kernel =
            n.rms ? norm_backward_kernel<Storage, true> : norm_backward_kernel<Storage, false>;
        launch("norm_backward", kernel, grid, block, shared, s, a);
    });
    reduce_partials(workspace, grid, dweight, s);
    if (!n.rms) reduce_partials(workspace + grid * C, grid, dbias, s);
}

// ===========================================================================================================
// RoPE: the pairs (x_i, x_{i + HS/2}) of a head are rotated by the angle position * f_i

namespace {

// f_i = theta^(-2i / HS), scaled (model.h, RopeScaling). `kept` is the part of f_i that is not divided: 0 up
// to low_freq_factor rotations in the original positions, 1 from high_freq_factor on, linear between.
__device__ double rope_frequency(double theta, int i, int half, const RopeScaling& s) {
    const double f = pow(theta, -static_cast<double>(i) / half);
    if (s.type == RopeScaling::Default) return f;
    double kept = 0;
    if (s.type == RopeScaling::Llama3) {
        const double rotations = static_cast<double>(s.original_positions) * f / (2 * 3.14159265358979323846),
                     range = static_cast<double>(s.high_freq_factor) - s.low_freq_factor;
        kept = fmin(fmax((rotations - s.low_freq_factor) / range, 0.0), 1.0);
    }
    return f * (kept + (1 - kept) / s.factor);
}

// table[t, i] = {cos, sin} of t f_i; in double, because angles reach thousands of radians.
__global__ void rope_table_kernel(int64_t n, int half, double theta, RopeScaling scaling, float2* table) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const double f = rope_frequency(theta, static_cast<int>(i % half), half, scaling);
    const double angle = static_cast<double>(i / half) * f;
    double sine, cosine;
    sincos(angle, &sine, &cosine);
    table[i] = {static_cast<float>(cosine), static_cast<float>(sine)};
}

// Four elements: half a head may be a multiple of four only.
__device__ uint2 load4(const bf16* p) { return *reinterpret_cast<const uint2*>(p); }
__device__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ float4 values4(uint2 raw) {
    const float2 lo = unpack(raw.x), hi = unpack(raw.y);
    return {lo.x, lo.y, hi.x, hi.y};
}
__device__ float4 values4(float4 raw) { return raw; }
__device__ float4 store4(bf16* p, float4 v) {  // and returns what is stored
    const uint2 raw = make_uint2(pack(v.x, v.y), pack(v.z, v.w));
    put(p, raw);
    return values4(raw);
}
__device__ float4 store4(float* p, float4 v) {
    put(p, v);
    return v;
}
// (x, y) -> (x cos - y sin, y cos + x sin): one of the two. The sign is in the sine.
__device__ float rotated(float own, float partner, float cosine, float sine) {
    return __fmaf_rn(own, cosine, __fmul_rn(partner, sine));
}
__device__ float4 rotated(float4 own, float4 partner, float4 a, float4 b, float sign) {  // a, b: four angles
    return {rotated(own.x, partner.x, a.x, sign * a.y), rotated(own.y, partner.y, a.z, sign * a.w),
            rotated(own.z, partner.z, b.x, sign * b.y), rotated(own.w, partner.w, b.z, sign * b.w)};
}
__device__ float larger_magnitude(float top, float4 v) {
    const float two = gpu::larger_magnitude(gpu::larger_magnitude(top, v.x), v.y);
    return gpu::larger_magnitude(gpu::larger_magnitude(two, v.z), v.w);
}

// A thread has four pairs of one row in ROPE_HEADS heads, which are rotated by the same angles. sign: 1
// forward, -1 backward. Heads from `rotated_heads` on (v) only enter the amax.
constexpr int ROPE_HEADS = 8, ROPE_THREADS = 256;
template <class T>
__global__ void __launch_bounds__(ROPE_THREADS) rope_kernel(T* qkv, Rope rope, uint32_t rows, int64_t cols,
                                                            uint32_t heads, float sign, AmaxAndScale* amax) {
    using Four = decltype(load4(static_cast<const T*>(nullptr)));
    const uint32_t half = static_cast<uint32_t>(rope.HS) / 2, quads = half / 4;
    const uint32_t rotated_heads = static_cast<uint32_t>(rope.rotated_cols / rope.HS);
    const uint32_t i = blockIdx.x * ROPE_THREADS + threadIdx.x, row = i / quads, angle = i % quads * 4;
    const uint32_t first = blockIdx.y * ROPE_HEADS;
    float top = 0;
    if (row < rows) {
        T* p = qkv + row * cols + first * rope.HS + angle;
        Four raw[ROPE_HEADS][2] = {};
#pragma unroll
        for (int h = 0; h < ROPE_HEADS; h++)
            if (first + h < heads)
                raw[h][0] = load4(p + h * rope.HS), raw[h][1] = load4(p + h * rope.HS + half);
        const float2* const at = rope.table + row % static_cast<uint32_t>(rope.T) * half + angle;
        const float4 a = reinterpret_cast<const float4*>(at)[0], b = reinterpret_cast<const float4*>(at)[1];
#pragma unroll
        for (int h = 0; h < ROPE_HEADS; h++) {
            if (first + h >= heads) break;
            float4 x = values4(raw[h][0]), y = values4(raw[h][1]);
            if (first + h < rotated_heads) {
                const float4 x_new = rotated(x, y, a, b, -sign), y_new = rotated(y, x, a, b, sign);
                x = store4(p + h * rope.HS, x_new);
                y = store4(p + h * rope.HS + half, y_new);
            }
            if (amax) top = larger_magnitude(larger_magnitude(top, x), y);
        }
    }
    if (amax) update_amax_by_warp(&amax->amax, magnitude(top));
}

// The angles depend on position and pair only: those of all heads of a thread are the same. Without an amax,
// columns that are not rotated are not touched.
void launch_rope(const Rope& r, const View& qkv, float sign, AmaxAndScale* amax, cudaStream_t s) {
    require(r.HS % 8 == 0 && r.rotated_cols % r.HS == 0 && qkv.cols % r.HS == 0,
            "a head size is not a multiple of 8");
    const int64_t quads = qkv.rows * r.HS / 8, heads = (amax ? qkv.cols : r.rotated_cols) / r.HS;
    require(quads < int64_t(1) << 32, "there are more rows than RoPE can count");
    if (quads == 0 || heads == 0) return;
    const dim3 grid(blocks(quads, ROPE_THREADS), blocks(heads, ROPE_HEADS));
    with_dense(qkv, [&](auto x) {
        using T = std::remove_pointer_t<decltype(x.data)>;
        launch("rope", rope_kernel<T>, grid, ROPE_THREADS, 0, s, x.data, r, static_cast<uint32_t>(qkv.rows),
               qkv.cols, static_cast<uint32_t>(heads), sign, amax);
    });
}

}  // namespace

void rope_table(const ModelConfig& c, int64_t positions, float2* table, cudaStream_t s) {
    const int64_t half = c.HS() / 2;
    launch("rope_table", rope_table_kernel, blocks(positions * half, 256), 256, 0, s, positions * half,
           static_cast<int>(half), c.rope_theta, c.rope_scaling, table);
}
void rope_forward(const Rope& r, const View& qkv, cudaStream_t s) { launch_rope(r, qkv, 1, nullptr, s); }
void rope_backward(const Rope& r, const View& dqkv, AmaxAndScale* amax, cudaStream_t s) {
    launch_rope(r, dqkv, -1, amax, s);
}

// ===========================================================================================================
// Cross-entropy

namespace {

__device__ float fast_exp(float x) { return fast_exp2(x * LOG2_E); }

// The sum of a softmax over a part of a row, in one pass: a maximum, and the sum of exp(x - maximum). Two
// parts are merged by rescaling the sum of the one with the smaller maximum.
struct Softmax {
    float top, sum;
    __device__ Softmax(float top = -INFINITY, float sum = 0) : top(top), sum(sum) {}
    __device__ void merge(const Softmax& o) {
        const float t = fmaxf(top, o.top);
        sum = sum * factor(top, t) + o.sum * factor(o.top, t);
        top = t;
    }
    static __device__ float factor(float from, float to) { return from == to ? 1.0f : fast_exp(from - to); }
};

constexpr int LOSS_THREADS = 512;
// Of all threads: merged within warps, then over the warps in order, so that every thread has the same bits.
__device__ Softmax block_softmax(Softmax mine) {
    __shared__ float tops[LOSS_THREADS / 32], sums[LOSS_THREADS / 32];
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        Softmax other;
        other.top = __shfl_down_sync(0xFFFFFFFFu, mine.top, lanes);
        other.sum = __shfl_down_sync(0xFFFFFFFFu, mine.sum, lanes);
        mine.merge(other);
    }
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = mine.top, sums[threadIdx.x / 32] = mine.sum;
    __syncthreads();
    Softmax all;
    for (int w = 0; w < LOSS_THREADS / 32; w++) all.merge({tops[w], sums[w]});
    return all;
}

// One block per token. The second pass reads the row from shared memory, each thread what it has left there;
// a row that is too long for it (not CACHED) comes from L2.
template <class T, bool CACHED>
__global__ void __launch_bounds__(LOSS_THREADS, sizeof(T) < 4 ? 3 : 2)
    cross_entropy_kernel(Dense<T> logits, int64_t stride, int64_t V, const int32_t* targets,
                         const double* scale_of_step, float* losses) {
    extern __shared__ __align__(16) unsigned char shared[];  // (stride) T
    typename Dense<T>::Raw* const cached = reinterpret_cast<typename Dense<T>::Raw*>(shared);
    const int64_t row = blockIdx.x, first = row * stride;
    const int32_t target = targets[row];
    if (target == NO_TARGET) {  // the whole block
        if (threadIdx.x == 0) losses[row] = 0;
        Values zeros = {};
        for (int64_t col = threadIdx.x * CHUNK; scale_of_step && col < stride; col += LOSS_THREADS * CHUNK)
            logits.round_and_store(first + col, zeros, true);
        return;
    }
    const float correct = static_cast<float>(logits.data[first + target]);
    constexpr int STEP = LOSS_THREADS * CHUNK, IN_FLIGHT = 4;
    const int live = static_cast<int>(V);
    auto mask = [&](int col, Values& x, float with) {  // columns beyond the vocabulary
        if (col + CHUNK <= live) return;
        for (int j = 0; j < CHUNK; j++) x[j] = col + j < live ? x[j] : with;
    };
    Softmax mine;
    for (int begin = threadIdx.x * CHUNK; begin < live; begin += IN_FLIGHT * STEP) {
        typename Dense<T>::Raw raw[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (begin + i * STEP < live) raw[i] = logits.load(first + begin + i * STEP);
#pragma unroll
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
    if (!scale_of_step) return;
    const float scale = static_cast<float>(*scale_of_step);
    // (softmax - one_hot(target)) * scale
#pragma unroll 4
    for (int col = threadIdx.x * CHUNK; col < static_cast<int>(stride); col += STEP) {
        Values x = {};
        if (col < live) logits.values(CACHED ? cached[col / CHUNK] : logits.load(first + col), x);
        for (int j = 0; j < CHUNK; j++) x[j] = fast_exp2(__fmaf_rn(x[j], LOG2_E, offset)) * scale;
        if (target >= col && target < col + CHUNK) {
            for (int j = 0; j < CHUNK; j++) x[j] -= col + j == target ? scale : 0.0f;
        }
        mask(col, x, 0.0f);
        logits.round_and_store(first + col, x, true);
    }
}

// One block: a step has few losses, and their order must not depend on the GPU.
constexpr int SUM_THREADS = 1024;
__global__ void __launch_bounds__(SUM_THREADS)
    loss_sum_kernel(const float* losses, int64_t n, const double* scale, double* total) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += SUM_THREADS) sum += losses[i];
    sum = block_sum<SUM_THREADS>(sum);
    if (threadIdx.x == 0) *total += *scale * sum;
}

}  // namespace

void cross_entropy(const View& logits, int64_t V, const int32_t* targets, const double* scale, float* losses,
                   cudaStream_t s) {
    require(V >= 1 && V <= logits.cols, "the vocabulary is larger than the logits");
    if (logits.rows == 0) return;
    with_dense(logits, [&](auto x) {
        using T = typename decltype(x)::Compute;
        const int row = static_cast<int>(logits.cols * sizeof(T));
        const bool cached = row <= shared_memory_limit() - 2048;  // beside the block's sums
        const auto kernel = cached ? cross_entropy_kernel<T, true> : cross_entropy_kernel<T, false>;
        launch("cross_entropy", kernel, static_cast<unsigned>(logits.rows), LOSS_THREADS, cached ? row : 0, s,
               x, logits.cols, V, targets, scale, losses);
    });
}

void loss_sum(const float* losses, int64_t n, const double* scale, double* total, cudaStream_t s) {
    launch("loss_sum", loss_sum_kernel, 1, SUM_THREADS, 0, s, losses, n, scale, total);
}

// ===========================================================================================================
// Embedding, backward

EmbeddingOrder embedding_order(const int32_t* tokens, int64_t N, int64_t V) {
    std::vector<int32_t> first(V + 1, 0);
    for (int64_t i = 0; i < N; i++) first[tokens[i] + 1]++;
    for (int64_t t = 0; t < V; t++) first[t + 1] += first[t];
    EmbeddingOrder out;
    out.order.resize(N);
    std::vector<int32_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < N; i++) out.order[next[tokens[i]]++] = static_cast<int32_t>(i);
    // Tokens with several runs come first: only their runs need partial sums.
    for (const bool several : {true, false})
        for (int64_t t = 0; t < V; t++) {
            const int32_t count = first[t + 1] - first[t],
                          runs = static_cast<int32_t>(ceil_div(count, RUN_ROWS));
            for (int32_t c = 0; c < runs && several == (runs > 1); c++)
                out.runs.push_back({static_cast<int32_t>(t), first[t] + c * RUN_ROWS,
                                    std::min(RUN_ROWS, count - c * RUN_ROWS), c ? 0 : runs});
        }
    return out;
}

namespace {

constexpr int EMBEDDING_THREADS = 128;
dim3 embedding_grid(int64_t n, int64_t C) {
    return {static_cast<unsigned>(n), blocks(C, EMBEDDING_THREADS * CHUNK)};
}
__device__ int64_t embedding_column() {
    return (int64_t(blockIdx.y) * EMBEDDING_THREADS + threadIdx.x) * CHUNK;
}

// sum += rows index(0) ... index(n - 1) of x at one chunk of columns, in that order.
template <class Index>
__device__ void sum_rows(EitherDense x, int64_t C, int64_t col, int n, Index index, Values& sum) {
#pragma unroll 4
    for (int i = 0; i < n; i++) {
        Values v;
        x.load_values(index(i) * C + col, v);
        for (int j = 0; j < CHUNK; j++) sum[j] += v[j];
    }
}

// Stage one: the rows of a run. A token with one run is done then; others leave their runs' sums in
// partials.
__global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_runs_kernel(EitherDense g, int64_t C, const int32_t* order, const TokenRun* runs,
                          EitherDense gradient, EitherDense partials) {
    const int64_t col = embedding_column();
    if (col >= C) return;
    const TokenRun run = runs[blockIdx.x];
    Values sum = {};
    sum_rows(g, C, col, run.count, [&](int i) { return int64_t(order[run.first + i]); }, sum);
    if (run.runs == 1) gradient.add(run.token * C + col, sum);
    else partials.round_and_store(blockIdx.x * C + col, sum, true);
}

// Stage two: the runs of a token that has several, in order.
__global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_tokens_kernel(int64_t C, const TokenRun* runs, EitherDense gradient, EitherDense partials) {
    const int64_t col = embedding_column();
    const TokenRun run = runs[blockIdx.x];
    if (col >= C || run.runs < 2) return;
    Values sum = {};
    sum_rows(partials, C, col, run.runs, [&](int i) { return int64_t(blockIdx.x) + i; }, sum);
    gradient.add(run.token * C + col, sum);
}

// Block t has position t: rows t, t + T, ... of g, one of each sequence.
__global__ void __launch_bounds__(EMBEDDING_THREADS)
    positions_kernel(EitherDense g, int64_t rows, int64_t C, int64_t period, EitherDense gradient) {
    const int64_t t = blockIdx.x, col = embedding_column();
    if (col >= C) return;
    Values sum = {};
    const int batch = static_cast<int>((rows - t + period - 1) / period);
    sum_rows(g, C, col, batch, [&](int b) { return b * period + t; }, sum);
    gradient.add(t * C + col, sum);
}

}  // namespace

void embedding_backward(const View& g, const int32_t* order, const TokenRun* runs,
                        int64_t number_of_runs, const View& gradient, float* workspace, cudaStream_t s) {
    if (number_of_runs == 0) return;
    const dim3 grid = embedding_grid(number_of_runs, g.cols);
    const EitherDense partials{workspace, true}, to = either_dense(gradient);
    launch("embedding_runs", embedding_runs_kernel, grid, EMBEDDING_THREADS, 0, s, either_dense(g), g.cols,
           order, runs, to, partials);
    launch("embedding_tokens", embedding_tokens_kernel, grid, EMBEDDING_THREADS, 0, s, g.cols, runs, to,
           partials);
}

void positions_backward(const View& g, int64_t T, const View& gradient, cudaStream_t s) {
    if (g.rows == 0) return;
    launch("positions_backward", positions_kernel, embedding_grid(std::min(T, g.rows), g.cols),
           EMBEDDING_THREADS, 0, s, either_dense(g), g.rows, g.cols, T, either_dense(gradient));
}

}  // namespace coat::gpu
