// attention.cu - causal attention forward and backward: the dispatch, and the two tellings that run on every GPU.
//
// The algorithm is FlashAttention-2 (arXiv 2307.08691). Forward: a block keeps a tile of queries and walks over tiles of keys with a
// running maximum and sum of each row (online softmax), so the scores live in registers only. Backward makes p again from the
// saved log-sum-exp; with delta = rowsum(dout * out):
//   dv = p^T dout,   dp = dout v^T,   ds = p * (dp - delta),   dq = ds k / sqrt(HS),   dk = ds^T q / sqrt(HS).
// Adding dq up from all key tiles with atomics would make the bits depend on timing. So there are two passes: one owns tiles of
// keys and walks over queries (dk, dv), the other owns queries and walks over keys (dq). They are one kernel, since they are the same
// computation with the roles of rows and columns exchanged: see Owner.
#include <cuda_bf16.h>

#include <algorithm>

#include "attention.cuh"
#include "attention_sm90.cuh"

namespace coat {
namespace {

using bf16 = __nv_bfloat16;

constexpr float LOG2E = 1.44269504f;
constexpr int WARP = 32;

using sm90::check;

// ---------------------------------------------------------------------------------------------------------------------
// Where things lie

template <class Real>
struct Head {  // one head of one sequence: (T, HS), rows `stride` elements apart
    Real* data;
    int64_t stride;
    __device__ Real* at(int t, int d) const { return data + t * stride + d; }
};

struct Dims {
    int T, NH, NKV, HS;
    float scale;  // 1 / sqrt(HS)

    __host__ __device__ int group() const { return NH / NKV; }  // query heads that share a key/value head
    __host__ __device__ int64_t qkv_cols() const { return int64_t(NH + 2 * NKV) * HS; }
    template <class Real>
    __device__ Head<Real> column(Real* qkv, int b, int head) const {
        return {qkv + b * T * qkv_cols() + int64_t(head) * HS, qkv_cols()};
    }
    template <class Real>
    __device__ Head<Real> q(Real* qkv, int b, int h) const { return column(qkv, b, h); }
    template <class Real>
    __device__ Head<Real> k(Real* qkv, int b, int kv) const { return column(qkv, b, NH + kv); }
    template <class Real>
    __device__ Head<Real> v(Real* qkv, int b, int kv) const { return column(qkv, b, NH + NKV + kv); }
    template <class Real>
    __device__ Head<Real> out(Real* out, int b, int h) const {
        return {out + (int64_t(b) * T * NH + h) * HS, int64_t(NH) * HS};
    }
    __device__ int64_t row(int b, int h) const { return (int64_t(b) * NH + h) * T; }  // of (B, NH, T)
};

Dims dims(const AttentionShape& s) {
    return {int(s.T), int(s.NH), int(s.NKV), int(s.HS), 1.0f / std::sqrt(float(s.HS))};
}

__device__ float to_float(float x) { return x; }
__device__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ void store(float* to, float x) { *to = x; }
__device__ void store(bf16* to, float x) { *to = __float2bfloat16(x); }

// The pass that owns keys adds up dk and dv; the pass that owns queries adds up dq.
enum class Owner { Keys, Queries };

template <class Real>
struct BackwardArgs {
    const Real *qkv, *dout;    // (B, T, qkv_cols), (B, T, NH HS)
    const float *lse, *delta;  // (B, NH, T)
    Real* dqkv;                // (B, T, qkv_cols)
};

// ---------------------------------------------------------------------------------------------------------------------
// delta (B, NH, T) = rowsum(dout * out), both (B, T, NH HS): `lanes` neighbours share a row, eight elements each.

__device__ void load8(const float* from, float* x) {
    const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
__device__ void load8(const bf16* from, float* x) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
    for (int i = 0; i < 4; i++) x[2 * i] = __uint_as_float(words[i] << 16), x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
}

// grid (rows of a sequence, B)
template <class Real>
__global__ void delta_kernel(Dims d, unsigned lanes, const Real* out, const Real* dout, float* delta) {
    const unsigned index = (blockIdx.x * blockDim.x + threadIdx.x) / lanes, chunk = threadIdx.x % lanes * 8;  // of (T, NH)
    const int t = static_cast<int>(index / d.NH), h = static_cast<int>(index % d.NH), b = blockIdx.y;
    float sum = 0;
    if (t < d.T && static_cast<int>(chunk) < d.HS) {
        float o[8], g[8];
        const Head<const Real> os = d.out(out, b, h), gs = d.out(dout, b, h);
        load8(os.at(t, chunk), o);
        load8(gs.at(t, chunk), g);
        for (int i = 0; i < 8; i++) sum += o[i] * g[i];
    }
    for (int i = lanes / 2; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    if (t < d.T && chunk == 0) delta[d.row(b, h) + t] = sum;
}

template <class Real>
void compute_delta(const AttentionShape& s, const Real* out, const Real* dout, float* delta, cudaStream_t stream) {
    int lanes = 1;
    while (lanes * 8 < s.HS) lanes *= 2;
    const dim3 grid(static_cast<unsigned>(ceil_div(s.T * s.NH * lanes, 256)), static_cast<unsigned>(s.B));
    delta_kernel<<<grid, 256, 0, stream>>>(dims(s), static_cast<unsigned>(lanes), out, dout, delta);
    check(cudaGetLastError(), "delta_kernel");
}

// ---------------------------------------------------------------------------------------------------------------------
// Plain CUDA cores, any format and head size. A warp owns two rows; a lane stands for one column while scores are made and
// for every 32nd element of the head while they are used.

namespace simple {

constexpr int WARPS = 8, ROWS = 2, BLOCK_ROWS = WARPS * ROWS, COLUMNS = WARP, MAX_CHUNKS = 256 / WARP;

// Rows first.. of a head as FP32 in shared memory, zero beyond T. A row takes HS + 1 floats: no two lanes share a bank.
template <class Real>
__device__ void load_tile(float* tile, const Dims& d, Head<const Real> head, int first, int rows) {
    for (int i = threadIdx.x; i < rows * d.HS; i += WARPS * WARP) {
        const int r = i / d.HS, c = i % d.HS;
        tile[r * (d.HS + 1) + c] = first + r < d.T ? to_float(*head.at(first + r, c)) : 0.0f;
    }
}

// The lane's column against the warp's rows: sum over the head of rows[r] * column.
__device__ void dot(const Dims& d, const float* rows, const float* column, float (&result)[ROWS]) {
    for (float& x : result) x = 0;
    for (int i = 0; i < d.HS; i++)
        for (int r = 0; r < ROWS; r++) result[r] = fmaf(rows[r * (d.HS + 1) + i], column[i], result[r]);
}

// acc (ROWS, HS) += weights (ROWS, COLUMNS, one column a lane) * tile (COLUMNS, HS)
__device__ void accumulate(const Dims& d, const float (&weights)[ROWS], const float* tile, float (&acc)[ROWS][MAX_CHUNKS]) {
    for (int c = 0; c < COLUMNS; c++) {
        float w[ROWS];
        for (int r = 0; r < ROWS; r++) w[r] = __shfl_sync(~0u, weights[r], c);
#pragma unroll
        for (int j = 0; j < MAX_CHUNKS; j++) {
            const int i = j * WARP + threadIdx.x % WARP;
            if (i >= d.HS) break;
            for (int r = 0; r < ROWS; r++) acc[r][j] = fmaf(w[r], tile[c * (d.HS + 1) + i], acc[r][j]);
        }
    }
}

template <class Real>
__device__ void write(const Dims& d, Head<Real> head, int first, const float (&acc)[ROWS][MAX_CHUNKS], const float (&factor)[ROWS]) {
#pragma unroll
    for (int j = 0; j < MAX_CHUNKS; j++) {
        const int i = j * WARP + threadIdx.x % WARP;
        for (int r = 0; r < ROWS; r++)
            if (i < d.HS && first + r < d.T) store(head.at(first + r, i), acc[r][j] * factor[r]);
    }
}

__device__ float warp_max(float x) {
    for (int i = WARP / 2; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}
__device__ float warp_sum(float x) {
    for (int i = WARP / 2; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// grid (tiles of queries, NH, B)
template <class Real>
__global__ void __launch_bounds__(WARPS* WARP) forward_kernel(Dims d, const Real* qkv, Real* out, float* lse) {
    extern __shared__ float shared[];
    float *queries = shared, *keys = queries + BLOCK_ROWS * (d.HS + 1), *values = keys + COLUMNS * (d.HS + 1);
    const int h = blockIdx.y, b = blockIdx.z, kv = h / d.group(), first = blockIdx.x * BLOCK_ROWS;
    const int warp_row = threadIdx.x / WARP * ROWS, lane = threadIdx.x % WARP, row = first + warp_row;
    load_tile(queries, d, d.q(qkv, b, h), first, BLOCK_ROWS);

    float acc[ROWS][MAX_CHUNKS] = {}, max[ROWS], sum[ROWS] = {};
    for (float& m : max) m = -INFINITY;
    for (int column = 0; column < min(d.T, first + BLOCK_ROWS); column += COLUMNS) {
        __syncthreads();
        load_tile(keys, d, d.k(qkv, b, kv), column, COLUMNS);
        load_tile(values, d, d.v(qkv, b, kv), column, COLUMNS);
        __syncthreads();
        float s[ROWS];
        dot(d, queries + warp_row * (d.HS + 1), keys + lane * (d.HS + 1), s);
        for (int r = 0; r < ROWS; r++) {
            s[r] = column + lane <= row + r ? s[r] * d.scale : -INFINITY;
            const float larger = fmaxf(max[r], warp_max(s[r])), shrink = expf(max[r] - larger);  // column 0 is never masked: finite
            s[r] = expf(s[r] - larger);
            sum[r] = sum[r] * shrink + warp_sum(s[r]);
            for (float& a : acc[r]) a *= shrink;
            max[r] = larger;
        }
        accumulate(d, s, values, acc);
    }
    float inverse[ROWS];
    for (int r = 0; r < ROWS; r++) {
        inverse[r] = 1.0f / sum[r];
        if (lane == 0 && row + r < d.T) lse[d.row(b, h) + row + r] = max[r] + logf(sum[r]);
    }
    write(d, d.out(out, b, h), row, acc, inverse);
}

// grid (tiles of owned rows, NKV or NH, B)
template <class Real, Owner OWNER>
__global__ void __launch_bounds__(WARPS* WARP) backward_kernel(Dims d, BackwardArgs<Real> a) {
    constexpr bool KEYS = OWNER == Owner::Keys;
    extern __shared__ float shared[];
    const int pitch = d.HS + 1;
    float *own1 = shared, *own2 = own1 + BLOCK_ROWS * pitch;         // k and v, or q and dout
    float *other1 = own2 + BLOCK_ROWS * pitch, *other2 = other1 + COLUMNS * pitch;  // the other pair
    const int b = blockIdx.z, first = blockIdx.x * BLOCK_ROWS, kv = KEYS ? blockIdx.y : blockIdx.y / d.group();
    const int warp_row = threadIdx.x / WARP * ROWS, lane = threadIdx.x % WARP, row = first + warp_row;
    const Head<const Real> k = d.k(a.qkv, b, kv), v = d.v(a.qkv, b, kv);

    float acc1[ROWS][MAX_CHUNKS] = {}, acc2[ROWS][MAX_CHUNKS] = {};  // dk and dv, or dq alone
    const int first_head = KEYS ? kv * d.group() : blockIdx.y, heads = KEYS ? d.group() : 1;
    for (int h = first_head; h < first_head + heads; h++) {
        const Head<const Real> q = d.q(a.qkv, b, h), dout = d.out(a.dout, b, h);
        load_tile(own1, d, KEYS ? k : q, first, BLOCK_ROWS);
        load_tile(own2, d, KEYS ? v : dout, first, BLOCK_ROWS);
        const int begin = KEYS ? first / COLUMNS * COLUMNS : 0, end = KEYS ? d.T : min(d.T, first + BLOCK_ROWS);
        for (int column = begin; column < end; column += COLUMNS) {
            __syncthreads();
            load_tile(other1, d, KEYS ? q : k, column, COLUMNS);
            load_tile(other2, d, KEYS ? dout : v, column, COLUMNS);
            __syncthreads();
            float p[ROWS], ds[ROWS];
            dot(d, own1 + warp_row * pitch, other1 + lane * pitch, p);
            dot(d, own2 + warp_row * pitch, other2 + lane * pitch, ds);
            for (int r = 0; r < ROWS; r++) {
                const int query = KEYS ? column + lane : row + r, key = KEYS ? row + r : column + lane;
                const bool live = key <= query && query < d.T;
                const int64_t at = d.row(b, h) + min(query, d.T - 1);
                p[r] = live ? expf(p[r] * d.scale - a.lse[at]) : 0.0f;
                ds[r] = p[r] * (ds[r] - a.delta[at]);
            }
            accumulate(d, ds, other1, acc1);
            if (KEYS) accumulate(d, p, other2, acc2);
        }
        __syncthreads();
    }
    float scale[ROWS], one[ROWS];
    for (int r = 0; r < ROWS; r++) scale[r] = d.scale, one[r] = 1;
    write(d, KEYS ? d.k(a.dqkv, b, kv) : d.q(a.dqkv, b, blockIdx.y), row, acc1, scale);
    if (KEYS) write(d, d.v(a.dqkv, b, kv), row, acc2, one);
}

unsigned row_tiles(const AttentionShape& s) { return static_cast<unsigned>(ceil_div(s.T, BLOCK_ROWS)); }

size_t shared_bytes(const AttentionShape& s, int own, int other) {
    return (own * BLOCK_ROWS + other * COLUMNS) * (s.HS + 1) * sizeof(float);
}

template <class Kernel, class... Args>
void launch(Kernel kernel, dim3 grid, size_t shared, cudaStream_t stream, Args... args) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "attention");
    kernel<<<grid, WARPS * WARP, shared, stream>>>(args...);
    check(cudaGetLastError(), "attention");
}

template <class Real>
void forward(const AttentionShape& s, const Real* qkv, Real* out, float* lse, cudaStream_t stream) {
    const dim3 grid(row_tiles(s), static_cast<unsigned>(s.NH), static_cast<unsigned>(s.B));
    launch(forward_kernel<Real>, grid, shared_bytes(s, 1, 2), stream, dims(s), qkv, out, lse);
}

template <class Real>
void backward(const AttentionShape& s, const BackwardArgs<Real>& a, cudaStream_t stream) {
    const dim3 keys(row_tiles(s), static_cast<unsigned>(s.NKV), static_cast<unsigned>(s.B));
    const dim3 queries(row_tiles(s), static_cast<unsigned>(s.NH), static_cast<unsigned>(s.B));
    launch(backward_kernel<Real, Owner::Keys>, keys, shared_bytes(s, 2, 2), stream, dims(s), a);
    launch(backward_kernel<Real, Owner::Queries>, queries, shared_bytes(s, 2, 2), stream, dims(s), a);
}

}  // namespace simple

// ---------------------------------------------------------------------------------------------------------------------
// Tensor cores through mma.sync m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), BF16, head sizes 64 and 128.

namespace mma {

constexpr int WARPS = 4, THREADS = WARPS * WARP, TILE = 64;  // rows or columns of a tile

struct FragmentA { uint32_t r[4]; };  // 16 x 16, two BF16 a register
struct FragmentB { uint32_t r[4]; };  // 16 x 16: two n8 halves, r[0..1] and r[2..3]

// A tile (rows, HS) of BF16 in shared memory. Chunks of 16 bytes are exclusive-ored with the row, so that the eight rows that
// one ldmatrix reads, and the eight chunks of a row that cp.async writes, lie in different banks.
template <int HS>
struct Tile {
    uint32_t base;
    static constexpr int BYTES = TILE * HS * 2;
    __device__ uint32_t at(int row, int col) const { return base + row * HS * 2 + (((col / 8) ^ (row & 7)) * 16); }
};

__device__ void cp_async16(uint32_t to, const void* from, bool live) {  // zeros where not live
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0));
}
__device__ void cp_async4(uint32_t to, const void* from, bool live) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(live ? 4 : 0));
}
__device__ void cp_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING)); }

template <int HS>
__device__ void load_tile(Tile<HS> tile, Head<const bf16> head, int first, int T, int rows = TILE) {
    constexpr int CHUNKS = HS / 8;
    for (int i = threadIdx.x; i < rows * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, col = i % CHUNKS * 8;
        cp_async16(tile.at(row, col), head.at(min(first + row, T - 1), col), first + row < T);
    }
}

__device__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
__device__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}
template <int HS>
__device__ FragmentA load_a(Tile<HS> tile, int row, int k) {
    FragmentA a;
    const int lane = threadIdx.x % WARP;
    ldmatrix(a.r, tile.at(row + lane % 16, k + lane / 16 * 8));
    return a;
}
template <int HS>  // of tile^T: the tile holds (n, k)
__device__ FragmentB load_b_transposed(Tile<HS> tile, int k, int n) {
    FragmentB b;
    const int lane = threadIdx.x % WARP;
    ldmatrix(b.r, tile.at(n + lane % 8 + lane / 16 * 8, k + lane / 8 % 2 * 8));
    return b;
}
template <int HS>  // the tile holds (k, n)
__device__ FragmentB load_b(Tile<HS> tile, int k, int n) {
    FragmentB b;
    const int lane = threadIdx.x % WARP;
    ldmatrix_transposed(b.r, tile.at(k + lane % 16, n + lane / 16 * 8));
    return b;
}

// c (16 x 8) += a (16 x 16) b (16 x 8). Of c a thread holds columns 2 (lane % 4) + {0, 1} of rows lane / 4 (c[0..1]) and + 8 (c[2..3]).
__device__ void mma(float (&c)[4], const FragmentA& a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}
__device__ void mma(float (&c0)[4], float (&c1)[4], const FragmentA& a, const FragmentB& b) {
    mma(c0, a, b.r[0], b.r[1]);
    mma(c1, a, b.r[2], b.r[3]);
}

__device__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}
// Accumulators of 16 neighbouring columns are, rounded, exactly the fragment that the next product wants.
__device__ FragmentA as_a(const float (&left)[4], const float (&right)[4]) {
    return {{pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]), pack(right[2], right[3])}};
}

// s (M x 16, TILE) = rows `row`.. of x (_, HS) times y (TILE, HS)^T. A fragment of y serves M products.
template <int HS, int M>
__device__ void scores(Tile<HS> x, int row, Tile<HS> y, float (&s)[M][TILE / 8][4]) {
#pragma unroll
    for (int i = 0; i < M * TILE / 2; i++) s[i / (TILE / 2)][i / 4 % (TILE / 8)][i % 4] = 0;
#pragma unroll
    for (int k = 0; k < HS; k += 16) {
        FragmentA a[M];
        for (int m = 0; m < M; m++) a[m] = load_a(x, row + m * 16, k);
#pragma unroll
        for (int n = 0; n < TILE; n += 16) {
            const FragmentB b = load_b_transposed(y, k, n);
            for (int m = 0; m < M; m++) mma(s[m][n / 8], s[m][n / 8 + 1], a[m], b);
        }
    }
}

// acc (M x 16, HS) += p (M x 16, TILE), rounded to BF16, times y (TILE, HS)
template <int HS, int M>
__device__ void accumulate(const float (&p)[M][TILE / 8][4], Tile<HS> y, float (&acc)[M][HS / 8][4]) {
#pragma unroll
    for (int k = 0; k < TILE; k += 16) {
        FragmentA a[M];
        for (int m = 0; m < M; m++) a[m] = as_a(p[m][k / 8], p[m][k / 8 + 1]);
#pragma unroll
        for (int n = 0; n < HS; n += 16) {
            const FragmentB b = load_b(y, k, n);
            for (int m = 0; m < M; m++) mma(acc[m][n / 8], acc[m][n / 8 + 1], a[m], b);
        }
    }
}

// Rows `row`.. of a head from accumulators; rows of c[0..1] times factor[0], of c[2..3] times factor[1].
template <int HS>
__device__ void write(Head<bf16> head, int row, int T, const float (&acc)[HS / 8][4], float factor0, float factor1) {
    const int lane = threadIdx.x % WARP, top = row + lane / 4, col = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < HS / 8; n++) {
        if (top < T) *reinterpret_cast<uint32_t*>(head.at(top, n * 8 + col)) = pack(acc[n][0] * factor0, acc[n][1] * factor0);
        if (top + 8 < T) *reinterpret_cast<uint32_t*>(head.at(top + 8, n * 8 + col)) = pack(acc[n][2] * factor1, acc[n][3] * factor1);
    }
}

// Online softmax of 16 rows: s becomes p against the new maximum, and what was added up before shrinks. `scale` includes log2 e: exponentials
// are powers of two. A row that has only masked columns so far has maximum -infinity, and p = 0.
template <int HS>
__device__ void softmax(float (&s)[TILE / 8][4], float (&max)[2], float (&sum)[2], float (&acc)[HS / 8][4], float scale) {
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = max[r];
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        top = quad_max(top);
        base[r] = top == -INFINITY ? 0.0f : top * scale;
        const float shrink = exp2_fast(max[r] * scale - base[r]);
        max[r] = top;
        sum[r] *= shrink;
#pragma unroll
        for (int n = 0; n < HS / 8; n++) acc[n][2 * r] *= shrink, acc[n][2 * r + 1] *= shrink;
    }
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) {
        float& p = s[i / 4][i % 4];
        p = exp2_fast(p * scale - base[i / 2 % 2]);
        sum[i / 2 % 2] += p;
    }
}

// Scores of keys after the query become -infinity: `ahead` is the tile's first key less this thread's first query.
__device__ void mask(float (&s)[TILE / 8][4], int ahead) {
    const int col = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < TILE / 2; i++)
        if (ahead + i / 4 * 8 + col + i % 2 > i / 2 % 2 * 8) s[i / 4][i % 4] = -INFINITY;
}

// A warp owns 32 queries, so that each fragment of keys or values that it reads from shared memory serves two products.
constexpr int FORWARD_M = 2, FORWARD_ROWS = WARPS * FORWARD_M * 16, FORWARD_TILES = FORWARD_ROWS / TILE;

// grid (NH, B, tiles of FORWARD_ROWS queries); the last tile, which has the most keys, goes first. Rows beyond T are zeros in shared memory:
// they make zeros or are not written, so the causal mask is the only one.
template <int HS>
__global__ void __launch_bounds__(THREADS) forward_kernel(Dims d, const bf16* qkv, bf16* out, float* lse) {
    constexpr int M = FORWARD_M;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const Tile<HS> keys{base}, values{base + Tile<HS>::BYTES}, queries{base + 2 * Tile<HS>::BYTES};  // queries: FORWARD_ROWS of them
    const int h = blockIdx.x, b = blockIdx.y, kv = h / d.group(), first = (gridDim.z - 1 - blockIdx.z) * FORWARD_ROWS;
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * M * 16, row = first + warp_row + lane / 4;
    const Head<const bf16> k = d.k(qkv, b, kv), v = d.v(qkv, b, kv);
    const float scale = d.scale * LOG2E;

    int column = (min(first + FORWARD_ROWS, d.T) - 1) / TILE * TILE;  // of the last tile of keys: from there back to the first
    load_tile(queries, d.q(qkv, b, h), first, d.T, FORWARD_ROWS);
    load_tile(keys, k, column, d.T);
    cp_commit();
    float acc[M][HS / 8][4] = {}, max[M][2], sum[M][2] = {};
    for (int i = 0; i < M * 2; i++) max[i / 2][i % 2] = -INFINITY;
    for (; column >= 0; column -= TILE) {
        const bool live = column < first + warp_row + M * 16;  // for this warp
        cp_wait<0>();
        __syncthreads();  // keys are here, values are free
        load_tile(values, v, column, d.T);
        cp_commit();
        float s[M][TILE / 8][4];
        if (live) scores<HS, M>(queries, warp_row, keys, s);
        cp_wait<0>();
        __syncthreads();  // values are here, keys are free
        if (column > 0) load_tile(keys, k, column - TILE, d.T);
        cp_commit();
        if (!live) continue;
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (column + TILE - 1 > first + warp_row + m * 16) mask(s[m], column - row - m * 16);
            softmax<HS>(s[m], max[m], sum[m], acc[m], scale);
        }
        accumulate<HS, M>(s, values, acc);
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        for (int r = 0; r < 2; r++) {
            const int query = row + m * 16 + r * 8;
            sum[m][r] = quad_sum(sum[m][r]);
            if (lane % 4 == 0 && query < d.T) lse[d.row(b, h) + query] = max[m][r] * d.scale + logf(sum[m][r]);
        }
        write<HS>(d.out(out, b, h), first + warp_row + m * 16, d.T, acc[m], 1.0f / sum[m][0], 1.0f / sum[m][1]);
    }
}

// What the pass streams through shared memory, twice for double buffering.
template <int HS>
struct Stage {
    Tile<HS> tile1, tile2;         // q and dout, or k and v
    uint32_t lse, delta;           // of the queries of the tile, where queries are streamed
    static constexpr int BYTES = 2 * Tile<HS>::BYTES + 2 * TILE * 4;
    __device__ explicit Stage(uint32_t base)
        : tile1{base}, tile2{base + Tile<HS>::BYTES}, lse(base + 2 * Tile<HS>::BYTES), delta(lse + TILE * 4) {}
};

__device__ float2 load_shared2(uint32_t address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

// grid (NKV or NH, B, tiles of owned rows)
template <int HS, Owner OWNER>
__global__ void __launch_bounds__(THREADS) backward_kernel(Dims d, BackwardArgs<bf16> a) {
    constexpr bool KEYS = OWNER == Owner::Keys;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const Tile<HS> own1{base}, own2{base + Tile<HS>::BYTES};  // k and v, or q and dout
    auto stage = [&](int step) { return Stage<HS>(base + 2 * Tile<HS>::BYTES + step % 2 * Stage<HS>::BYTES); };
    const int b = blockIdx.y, kv = KEYS ? blockIdx.x : blockIdx.x / d.group(), first_head = KEYS ? kv * d.group() : blockIdx.x;
    const int tile = KEYS ? blockIdx.z : gridDim.z - 1 - blockIdx.z;  // the longest first
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * 16, row = tile * TILE + warp_row + lane / 4;
    const Head<const bf16> k = d.k(a.qkv, b, kv), v = d.v(a.qkv, b, kv);

    const float scale = d.scale * LOG2E;

    // The walk: for each query head of the group (owned queries: the one), the column tiles that the mask leaves.
    const int begin = KEYS ? tile : 0, count = KEYS ? gridDim.z - tile : tile + 1, steps = count * (KEYS ? d.group() : 1);
    auto load_stage = [&](int step) {
        if (step >= steps) return;
        const Stage<HS> to = stage(step);
        const int h = first_head + step / count, column = (begin + step % count) * TILE;
        load_tile(to.tile1, KEYS ? d.q(a.qkv, b, h) : k, column, d.T);
        load_tile(to.tile2, KEYS ? d.out(a.dout, b, h) : v, column, d.T);
        if (!KEYS) return;
        const int i = threadIdx.x % TILE, query = column + i;
        const float* from = (threadIdx.x < TILE ? a.lse : a.delta) + d.row(b, h) + min(query, d.T - 1);
        cp_async4((threadIdx.x < TILE ? to.lse : to.delta) + i * 4, from, query < d.T);
    };
    load_tile(own1, KEYS ? k : d.q(a.qkv, b, first_head), tile * TILE, d.T);
    load_tile(own2, KEYS ? v : d.out(a.dout, b, first_head), tile * TILE, d.T);
    load_stage(0);
    cp_commit();

    float row_lse[2] = {}, row_delta[2] = {};  // owned queries
    for (int r = 0; !KEYS && r < 2; r++) {
        const int64_t at = d.row(b, first_head) + min(row + 8 * r, d.T - 1);
        row_lse[r] = a.lse[at], row_delta[r] = a.delta[at];
    }
    float acc1[1][HS / 8][4] = {}, acc2[1][HS / 8][4] = {};  // dk and dv, or dq alone
    for (int step = 0; step < steps; step++) {
        load_stage(step + 1);
        cp_commit();
        cp_wait<1>();
        __syncthreads();
        const Stage<HS> in = stage(step);
        const bool diagonal = (begin + step % count) == tile;
        float p[1][TILE / 8][4], ds[1][TILE / 8][4];
        scores<HS, 1>(own1, warp_row, in.tile1, p);
        scores<HS, 1>(own2, warp_row, in.tile2, ds);  // dp
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
            const int col = n * 8 + lane % 4 * 2;
            float2 lse{}, delta{};
            if (KEYS) lse = load_shared2(in.lse + col * 4), delta = load_shared2(in.delta + col * 4);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float l = KEYS ? (i % 2 ? lse.y : lse.x) : row_lse[i / 2], dl = KEYS ? (i % 2 ? delta.y : delta.x) : row_delta[i / 2];
                const int own = row + i / 2 * 8, other = tile * TILE + col + i % 2;
                const bool masked = diagonal && (KEYS ? own > other : other > own);
                p[0][n][i] = masked ? 0.0f : exp2_fast(p[0][n][i] * scale - l * LOG2E);
                ds[0][n][i] = p[0][n][i] * (ds[0][n][i] - dl);
            }
        }
        if (KEYS) accumulate<HS, 1>(p, in.tile2, acc2);
        accumulate<HS, 1>(ds, in.tile1, acc1);
        __syncthreads();  // the stage is free
    }
    write<HS>(KEYS ? d.k(a.dqkv, b, kv) : d.q(a.dqkv, b, first_head), tile * TILE + warp_row, d.T, acc1[0], d.scale, d.scale);
    if (KEYS) write<HS>(d.v(a.dqkv, b, kv), tile * TILE + warp_row, d.T, acc2[0], 1, 1);
}

template <class Kernel, class... Args>
void launch(Kernel kernel, dim3 grid, int shared, cudaStream_t stream, Args... args) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "attention");
    kernel<<<grid, THREADS, shared, stream>>>(args...);
    check(cudaGetLastError(), "attention");
}

template <int HS>
void forward(const AttentionShape& s, const bf16* qkv, bf16* out, float* lse, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(s.NH), static_cast<unsigned>(s.B), static_cast<unsigned>(ceil_div(s.T, FORWARD_ROWS)));
    launch(forward_kernel<HS>, grid, (2 + FORWARD_TILES) * Tile<HS>::BYTES, stream, dims(s), qkv, out, lse);
}

template <int HS>
void backward(const AttentionShape& s, const BackwardArgs<bf16>& a, cudaStream_t stream) {
    const unsigned B = static_cast<unsigned>(s.B), tiles = static_cast<unsigned>(ceil_div(s.T, TILE));
    const int shared = 2 * Tile<HS>::BYTES + 2 * Stage<HS>::BYTES;
    launch(backward_kernel<HS, Owner::Keys>, dim3(static_cast<unsigned>(s.NKV), B, tiles), shared, stream, dims(s), a);
    launch(backward_kernel<HS, Owner::Queries>, dim3(static_cast<unsigned>(s.NH), B, tiles), shared, stream, dims(s), a);
}

}  // namespace mma

// ---------------------------------------------------------------------------------------------------------------------
// The dispatch

bool tensor_cores_fit(const AttentionShape& s) { return s.format == Format::BF16 && (s.HS == 64 || s.HS == 128); }

bool is_hopper() {
    int device = 0, major = 0;
    check(cudaGetDevice(&device), "attention");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "attention");
    return major == 9;
}

AttentionKernel choose(const AttentionShape& s, AttentionKernel wanted) {
    if (s.HS % 8 != 0 || s.HS > 256 || s.NH % s.NKV != 0 || !(s.format == Format::F32 || s.format == Format::BF16))
        throw Error("Attention on the GPU needs fp32 or bf16, a head size that is a multiple of 8 up to 256, and query heads that are a "
                    "multiple of key/value heads; change the model's config.");
    const bool fits = tensor_cores_fit(s);
    if (wanted == AttentionKernel::Best)
        return !fits         ? AttentionKernel::Simple
               : is_hopper() ? AttentionKernel::Hopper
                             : AttentionKernel::TensorCores;
    if (wanted != AttentionKernel::Simple && !fits)
        throw Error("Attention on tensor cores needs bf16 and a head size of 64 or 128; ask for AttentionKernel::Best.");
    if (wanted == AttentionKernel::Hopper && !is_hopper())
        throw Error("Attention with wgmma needs a Hopper GPU; ask for AttentionKernel::Best.");
    return wanted;
}

size_t delta_bytes(const AttentionShape& s) { return round_up(s.B * s.NH * s.T * int64_t(sizeof(float)), 256); }

template <class Real>
BackwardArgs<Real> with_delta(const AttentionShape& s, const void* qkv, const void* out, const float* lse, const void* dout, void* dqkv,
                              void* workspace, cudaStream_t stream) {
    float* delta = static_cast<float*>(workspace);  // (B, NH, T)
    compute_delta(s, static_cast<const Real*>(out), static_cast<const Real*>(dout), delta, stream);
    return {static_cast<const Real*>(qkv), static_cast<const Real*>(dout), lse, delta, static_cast<Real*>(dqkv)};
}

}  // namespace

void attention_forward(const AttentionShape& s, const void* qkv, void* out, float* lse, cudaStream_t stream, AttentionKernel wanted) {
    const AttentionKernel kernel = choose(s, wanted);
    if (s.format == Format::F32)
        return simple::forward(s, static_cast<const float*>(qkv), static_cast<float*>(out), lse, stream);
    if (kernel == AttentionKernel::Hopper) return sm90::attention_forward(s, qkv, out, lse, stream);
    const bf16* in = static_cast<const bf16*>(qkv);
    bf16* to = static_cast<bf16*>(out);
    if (kernel == AttentionKernel::Simple) return simple::forward(s, in, to, lse, stream);
    s.HS == 64 ? mma::forward<64>(s, in, to, lse, stream) : mma::forward<128>(s, in, to, lse, stream);
}

void attention_backward(const AttentionShape& s, const void* qkv, const void* out, const float* lse, const void* dout, void* dqkv,
                        void* workspace, cudaStream_t stream, AttentionKernel wanted) {
    const AttentionKernel kernel = choose(s, wanted);
    if (s.format == Format::F32)
        return simple::backward(s, with_delta<float>(s, qkv, out, lse, dout, dqkv, workspace, stream), stream);
    if (kernel == AttentionKernel::Hopper) return sm90::attention_backward(s, qkv, out, lse, dout, dqkv, workspace, stream);
    const BackwardArgs<bf16> args = with_delta<bf16>(s, qkv, out, lse, dout, dqkv, workspace, stream);
    if (kernel == AttentionKernel::Simple) return simple::backward(s, args, stream);
    s.HS == 64 ? mma::backward<64>(s, args, stream) : mma::backward<128>(s, args, stream);
}

size_t attention_workspace(const AttentionShape& s) {
    return std::max<size_t>(delta_bytes(s), tensor_cores_fit(s) ? sm90::attention_workspace(s) : 0);
}

}  // namespace coat
