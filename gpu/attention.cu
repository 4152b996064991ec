// attention.cu - causal attention forward and backward: the choice of an implementation, and the two
// that run on every GPU (CUDA cores; tensor cores through mma.sync).
//
// The algorithm is flash attention (FlashAttention-2, arXiv 2307.08691), which never stores the T x T scores.
//
// Forward: a block keeps a tile of queries and loops over tiles of keys and values. The softmax of a
// row needs its maximum and its sum over all keys, so it is computed "online": with a running maximum
// m and a running sum l. When a tile of keys raises m, l and the output so far are multiplied by
// exp(m_old - m_new). At the end the output is divided by l, and lse = m + log(l), the log-sum-exp,
// is saved: one value per query.
//
// Backward recomputes p = exp(s - lse) from q, k and lse. With delta = rowsum(dout * out), one value
// per query:
//   dv = p^T dout,  dp = dout v^T,  ds = p * (dp - delta),  dq = ds k / sqrt(HS),  dk = ds^T q / sqrt(HS).
// dk and dv are sums over queries, dq is a sum over keys. Atomic additions would make the bits depend
// on timing, so there are two passes. The first owns tiles of keys and loops over queries (dk, dv);
// the second owns tiles of queries and loops over keys (dq). One kernel does both, because they
// differ only in which side is the rows: see Owner. The price is that s and dp are computed twice.
#include "attention_common.cuh"

namespace coat {
namespace {

using namespace flash;

// One head of one sequence: (T, HS), with rows `stride` elements apart.
template <class Real> struct Head {
    Real* data;
    int64_t stride;
    __device__ Real* at(int t, int d) const { return data + t * stride + d; }
};

// Where the heads of a tensor start; b is the sequence, h a query head, kv a key/value head.
struct Heads : Dims {
    explicit Heads(const AttentionShape& s) : Dims(dims(s)) {}
    template <class Real> __device__ Head<Real> of(Real* x, int heads, int b, int h) const {
        return {x + (int64_t(b) * T * heads + h) * HS, int64_t(heads) * HS};
    }
    template <class Real> __device__ Head<Real> q(Real* x, int b, int h) const {
        return of(x, NH + 2 * NKV, b, h);
    }
    template <class Real> __device__ Head<Real> k(Real* x, int b, int kv) const { return q(x, b, NH + kv); }
    template <class Real> __device__ Head<Real> v(Real* x, int b, int kv) const { return k(x, b, NKV + kv); }
    template <class Real> __device__ Head<Real> out(Real* x, int b, int h) const { return of(x, NH, b, h); }
    __device__ int64_t row(int b, int h) const { return (int64_t(b) * NH + h) * T; }  // of (B, NH, T)
};

// The pass that owns keys computes dk and dv; the pass that owns queries computes dq.
enum class Owner { Keys, Queries };

template <class Real> struct BackwardArgs {
    const Real *qkv, *dout;    // (B, T, qkv_cols), (B, T, NH HS)
    const float *lse, *delta;  // (B, NH, T)
    Real* dqkv;                // (B, T, qkv_cols)
};

// -----------------------------------------------------------------------------------------------------------
// Plain CUDA cores, any format and head size: short, not fast. A warp has one row. While scores are computed
// a lane stands for one column; while they are used, it stands for every 32nd element of the head.

namespace simple {

constexpr int WARPS = 8, THREADS = WARPS * WARP, MAX_CHUNKS = 256 / WARP;

dim3 grid(const AttentionShape& s, int64_t heads) {  // (blocks of WARPS rows, heads, B)
    return {blocks(s.T, WARPS), unsigned(heads), unsigned(s.B)};
}
__device__ int warp_row() { return blockIdx.x * WARPS + threadIdx.x / WARP; }

// The dot product of `count` elements, a multiple of CHUNK, one after the other.
template <class Real> __device__ float dot(const Real* a, const Real* b, int count) {
    auto load = [](const Real* from) { return Dense<Real>{const_cast<Real*>(from)}.load(0); };
    float sum = 0;
    for (int i = 0; i < count; i += CHUNK) sum = flash::dot<Real>(load(a + i), load(b + i), sum);
    return sum;
}

// acc (HS) += weight (of each lane) times the lane's row of x, WARP rows from `first` on
template <class Real>
__device__ void accumulate(const Heads& d, float weight, Head<Real> x, int first, float (&acc)[MAX_CHUNKS]) {
    for (int c = 0; c < min(WARP, d.T - first); c++) {
        const float w = __shfl_sync(~0u, weight, c);
#pragma unroll
        for (int j = 0; j < MAX_CHUNKS; j++) {
            const int i = j * WARP + threadIdx.x % WARP;
            if (i < d.HS) acc[j] = fmaf(w, float(*x.at(first + c, i)), acc[j]);
        }
    }
}

template <class Real>
__device__ void write(const Heads& d, Real* row, const float (&acc)[MAX_CHUNKS], float factor) {
#pragma unroll
    for (int j = 0; j < MAX_CHUNKS; j++) {
        const int i = j * WARP + threadIdx.x % WARP;
        if (i < d.HS) row[i] = Real(acc[j] * factor);
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

template <class Real>
__global__ void __launch_bounds__(THREADS) forward_kernel(Heads d, const Real* qkv, Real* out, float* lse) {
    const int h = blockIdx.y, b = blockIdx.z, kv = h / d.group(), row = warp_row(), lane = threadIdx.x % WARP;
    if (row >= d.T) return;
    const Head<const Real> q = d.q(qkv, b, h), k = d.k(qkv, b, kv), v = d.v(qkv, b, kv);
    float acc[MAX_CHUNKS] = {}, max = -INFINITY, sum = 0;
    for (int column = 0; column <= row; column += WARP) {
        const int key = column + lane;
        const float s = key <= row ? dot(q.at(row, 0), k.at(key, 0), d.HS) * d.scale : -INFINITY;
        const float larger = fmaxf(max, warp_max(s));  // finite, because key 0 is never masked
        const float shrink = expf(max - larger), p = expf(s - larger);
        sum = sum * shrink + warp_sum(p);
        for (float& a : acc) a *= shrink;
        max = larger;
        accumulate(d, p, v, column, acc);
    }
    if (lane == 0) lse[d.row(b, h) + row] = max + logf(sum);
    write(d, d.out(out, b, h).at(row, 0), acc, 1.0f / sum);
}

// delta (B, NH, T) = rowsum(dout * out); a lane has eight elements
template <class Real>
__global__ void __launch_bounds__(THREADS)
    delta_kernel(Heads d, const Real* out, const Real* dout, float* delta) {
    const int h = blockIdx.y, b = blockIdx.z, row = warp_row(), first = threadIdx.x % WARP * CHUNK;
    if (row >= d.T) return;
    const int count = first < d.HS ? CHUNK : 0;
    const float sum = warp_sum(dot(d.out(out, b, h).at(row, first), d.out(dout, b, h).at(row, first), count));
    if (first == 0) delta[d.row(b, h) + row] = sum;
}

template <class Real, Owner OWNER>
__global__ void __launch_bounds__(THREADS) backward_kernel(Heads d, BackwardArgs<Real> a) {
    constexpr bool KEYS = OWNER == Owner::Keys;
    const int row = warp_row(), b = blockIdx.z, kv = KEYS ? blockIdx.y : blockIdx.y / d.group();
    if (row >= d.T) return;
    const Head<const Real> k = d.k(a.qkv, b, kv), v = d.v(a.qkv, b, kv);
    float acc1[MAX_CHUNKS] = {}, acc2[MAX_CHUNKS] = {};  // dk and dv, or dq alone
    const int first_head = KEYS ? kv * d.group() : blockIdx.y, heads = KEYS ? d.group() : 1;
    for (int h = first_head; h < first_head + heads; h++) {
        const Head<const Real> q = d.q(a.qkv, b, h), dout = d.out(a.dout, b, h);
        for (int column = KEYS ? row / WARP * WARP : 0; column < (KEYS ? d.T : row + 1); column += WARP) {
            const int other = column + threadIdx.x % WARP, query = KEYS ? other : row,
                      key = KEYS ? row : other;
            float p = 0, ds = 0;
            if (key <= query && query < d.T) {
                const int64_t at = d.row(b, h) + query;
                p = expf(dot(q.at(query, 0), k.at(key, 0), d.HS) * d.scale - a.lse[at]);
                ds = p * (dot(dout.at(query, 0), v.at(key, 0), d.HS) - a.delta[at]);
            }
            accumulate(d, ds, KEYS ? q : k, column, acc1);
            if (KEYS) accumulate(d, p, dout, column, acc2);
        }
    }
    write(d, (KEYS ? d.k(a.dqkv, b, kv) : d.q(a.dqkv, b, first_head)).at(row, 0), acc1, d.scale);
    if (KEYS) write(d, d.v(a.dqkv, b, kv).at(row, 0), acc2, 1);
}

template <class Real>
void forward(const AttentionShape& s, const void* qkv, void* out, float* lse, cudaStream_t stream) {
    launch("attention", forward_kernel<Real>, grid(s, s.NH), THREADS, 0, stream, Heads(s),
           static_cast<const Real*>(qkv), static_cast<Real*>(out), lse);
}

// The typed arguments of a backward pass, with delta in the workspace.
template <class Real>
BackwardArgs<Real> with_delta(const AttentionShape& s, const void* qkv, const void* out, const float* lse,
                              const void* dout, void* dqkv, void* workspace, cudaStream_t stream) {
    float* const delta = static_cast<float*>(workspace);
    const BackwardArgs<Real> args{static_cast<const Real*>(qkv), static_cast<const Real*>(dout), lse, delta,
                                  static_cast<Real*>(dqkv)};
    launch("attention", delta_kernel<Real>, grid(s, s.NH), THREADS, 0, stream, Heads(s),
           static_cast<const Real*>(out), args.dout, delta);
    return args;
}

template <class Real>
void backward(const AttentionShape& s, const void* qkv, const void* out, const float* lse, const void* dout,
              void* dqkv, void* workspace, cudaStream_t stream) {
    const auto args = with_delta<Real>(s, qkv, out, lse, dout, dqkv, workspace, stream);
    launch("attention", backward_kernel<Real, Owner::Keys>, grid(s, s.NKV), THREADS, 0, stream, Heads(s),
           args);
    launch("attention", backward_kernel<Real, Owner::Queries>, grid(s, s.NH), THREADS, 0, stream, Heads(s),
           args);
}

}  // namespace simple

// -----------------------------------------------------------------------------------------------------------
// Tensor cores through mma.sync m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): BF16, head
// sizes 64 and 128

namespace mma {

constexpr int WARPS = 4, THREADS = WARPS * WARP, TILE = 64;  // rows or columns of a tile

struct Fragment {   // a 16 x 16 operand, spread over a warp; two BF16 values per register
    uint32_t r[4];  // of a right operand r[0..1] are the first 8 columns, r[2..3] the others
};

// A tile (rows, HS) of BF16 in shared memory. Chunks of 16 bytes are permuted by exclusive or with
// the row. So the eight rows that one ldmatrix reads, and the eight chunks of a row that cp.async
// writes, are in different banks.
template <int HS> struct Tile {
    uint32_t base;
    static constexpr int BYTES = TILE * HS * 2;
    __device__ uint32_t at(int row, int col) const {
        return base + row * HS * 2 + (((col / 8) ^ (row & 7)) * 16);
    }
};

// cp.async copies from global to shared memory in the background; it writes zeros if not `live`.
__device__ void cp_async16(uint32_t to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0));
}
__device__ void cp_async4(uint32_t to, const void* from, bool live) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(live ? 4 : 0));
}
__device__ void cp_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>  // until at most PENDING groups of copies are in flight
__device__ void cp_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING));
}

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
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
template <int HS> __device__ Fragment load_a(Tile<HS> tile, int row, int k) {
    Fragment a;
    const int lane = threadIdx.x % WARP;
    ldmatrix(a.r, tile.at(row + lane % 16, k + lane / 16 * 8));
    return a;
}
template <int HS>  // b = tile^T: the tile is (n, k)
__device__ Fragment load_b_transposed(Tile<HS> tile, int k, int n) {
    Fragment b;
    const int lane = threadIdx.x % WARP;
    ldmatrix(b.r, tile.at(n + lane % 8 + lane / 16 * 8, k + lane / 8 % 2 * 8));
    return b;
}
template <int HS>  // the tile is (k, n)
__device__ Fragment load_b(Tile<HS> tile, int k, int n) {
    Fragment b;
    const int lane = threadIdx.x % WARP;
    ldmatrix_transposed(b.r, tile.at(k + lane % 16, n + lane / 16 * 8));
    return b;
}

// c (16 x 16) += a (16 x 16) b (16 x 16), as two instructions of 8 columns. c is spread as
// attention_common.cuh describes.
__device__ void mma(float* c, const Fragment& a, const Fragment& b) {
    for (int i = 0; i < 2; i++)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[4 * i]), "+f"(c[4 * i + 1]), "+f"(c[4 * i + 2]), "+f"(c[4 * i + 3])
            : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2 * i]), "r"(b.r[2 * i + 1]));
}

// s (M x 16, TILE) = rows of x (_, HS) times y (TILE, HS)^T. A fragment of y serves M GEMM instructions.
template <int HS, int M> __device__ void scores(Tile<HS> x, int row, Tile<HS> y, float (&s)[M][TILE / 2]) {
#pragma unroll
    for (int i = 0; i < M * TILE / 2; i++) s[i / (TILE / 2)][i % (TILE / 2)] = 0;
#pragma unroll
    for (int k = 0; k < HS; k += 16) {
        Fragment a[M];
        for (int m = 0; m < M; m++) a[m] = load_a(x, row + m * 16, k);
#pragma unroll
        for (int n = 0; n < TILE; n += 16) {
            const Fragment b = load_b_transposed(y, k, n);
            for (int m = 0; m < M; m++) mma(&s[m][n / 2], a[m], b);
        }
    }
}

// acc (M x 16, HS) += p (M x 16, TILE), rounded to BF16, times y (TILE, HS). The registers of 16
// columns of p are in the layout of a left operand.
template <int HS, int M>
__device__ void accumulate(const float (&p)[M][TILE / 2], Tile<HS> y, float (&acc)[M][HS / 2]) {
#pragma unroll
    for (int k = 0; k < TILE; k += 16) {
        Fragment a[M];
        for (int i = 0; i < M * 4; i++)
            a[i / 4].r[i % 4] = pack(p[i / 4][k / 2 + i % 4 * 2], p[i / 4][k / 2 + i % 4 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < HS; n += 16) {
            const Fragment b = load_b(y, k, n);
            for (int m = 0; m < M; m++) mma(&acc[m][n / 2], a[m], b);
        }
    }
}

// Writes 16 rows of a head from accumulators, times factor0 (the first 8 rows) or factor1.
template <int HS>
__device__ void write(Head<bf16> head, int row, int T, const float (&acc)[HS / 2], float factor0,
                      float factor1) {
    const int top = row + threadIdx.x % WARP / 4;
    auto put2 = [&](int t, int col, float x, float y) {
        if (t < T) *reinterpret_cast<uint32_t*>(head.at(t, col)) = pack(x, y);
    };
#pragma unroll
    for (int i = 0; i < HS / 2; i += 4) {
        put2(top, i * 2 + fragment_col(), acc[i] * factor0, acc[i + 1] * factor0);
        put2(top + 8, i * 2 + fragment_col(), acc[i + 2] * factor1, acc[i + 3] * factor1);
    }
}

// A warp owns 32 queries, so that each fragment of keys or values that it reads from shared memory is
// used twice.
constexpr int FORWARD_M = 2, FORWARD_ROWS = WARPS * FORWARD_M * 16, FORWARD_TILES = FORWARD_ROWS / TILE;

// grid (NH, B, tiles of FORWARD_ROWS queries); the last tile, which has the most keys, goes first.
// Rows beyond T are zeros in shared memory. They result in zeros or are not written, so the causal
// mask is the only mask.
template <int HS>
__global__ void __launch_bounds__(THREADS) forward_kernel(Heads d, const bf16* qkv, bf16* out, float* lse) {
    constexpr int M = FORWARD_M;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const Tile<HS> keys{base}, values{base + Tile<HS>::BYTES}, queries{base + 2 * Tile<HS>::BYTES};
    const int h = blockIdx.x, b = blockIdx.y, kv = h / d.group();
    const int first = (gridDim.z - 1 - blockIdx.z) * FORWARD_ROWS, warp_row = threadIdx.x / WARP * M * 16;
    const int lane = threadIdx.x % WARP, row = first + warp_row + lane / 4;
    const Head<const bf16> k = d.k(qkv, b, kv), v = d.v(qkv, b, kv);
    const float scale = d.scale * LOG2_E;

    // From the last tile of keys that these queries see back to the first.
    int column = (min(first + FORWARD_ROWS, d.T) - 1) / TILE * TILE;
    load_tile(queries, d.q(qkv, b, h), first, d.T, FORWARD_ROWS);
    load_tile(keys, k, column, d.T);
    cp_commit();
    float acc[M][HS / 2] = {}, max[M][2], sum[M][2] = {}, shrink[2];
    for (int i = 0; i < M * 2; i++) max[i / 2][i % 2] = -INFINITY;
    for (; column >= 0; column -= TILE) {
        const bool live = column < first + warp_row + M * 16;  // this warp sees some of these keys
        cp_wait<0>();
        __syncthreads();  // keys have arrived, values may be overwritten
        load_tile(values, v, column, d.T);
        cp_commit();
        float s[M][TILE / 2];
        if (live) scores<HS, M>(queries, warp_row, keys, s);
        cp_wait<0>();
        __syncthreads();  // values have arrived, keys may be overwritten
        if (column > 0) load_tile(keys, k, column - TILE, d.T);
        cp_commit();
        if (!live) continue;
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (column + TILE - 1 > first + warp_row + m * 16) mask(s[m], column - row - m * 16);
            softmax(s[m], max[m], sum[m], shrink, scale);
#pragma unroll
            for (int i = 0; i < HS / 2; i++) acc[m][i] *= shrink[i / 2 % 2];
        }
        accumulate<HS, M>(s, values, acc);
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        for (int r = 0; r < 2; r++) {
            const int query = row + m * 16 + r * 8;
            sum[m][r] = quad_sum(sum[m][r]);
            if (lane % 4 == 0 && query < d.T)
                lse[d.row(b, h) + query] = max[m][r] * d.scale + logf(sum[m][r]);
        }
        const int top = first + warp_row + m * 16;
        write<HS>(d.out(out, b, h), top, d.T, acc[m], 1.0f / sum[m][0], 1.0f / sum[m][1]);
    }
}

// What a pass of backward loads per step. There are two stages: one is loaded while the other is used.
template <int HS> struct Stage {
    Tile<HS> tile1, tile2;  // q and dout, or k and v
    uint32_t lse, delta;    // of the queries in tile1; only for the pass that owns keys
    static constexpr int BYTES = 2 * Tile<HS>::BYTES + 2 * TILE * 4;
    __device__ explicit Stage(uint32_t base)
        : tile1{base}, tile2{base + Tile<HS>::BYTES}, lse(base + 2 * Tile<HS>::BYTES), delta(lse + TILE * 4) {
    }
};

// grid (NKV or NH, B, tiles of owned rows)
template <int HS, Owner OWNER>
__global__ void __launch_bounds__(THREADS) backward_kernel(Heads d, BackwardArgs<bf16> a) {
    constexpr bool KEYS = OWNER == Owner::Keys;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const Tile<HS> own1{base}, own2{base + Tile<HS>::BYTES};  // k and v, or q and dout
    auto stage = [&](int i) { return Stage<HS>(base + 2 * Tile<HS>::BYTES + i % 2 * Stage<HS>::BYTES); };
    const int b = blockIdx.y, kv = KEYS ? blockIdx.x : blockIdx.x / d.group();
    const int first_head = KEYS ? kv * d.group() : blockIdx.x;
    const int tile = KEYS ? blockIdx.z : gridDim.z - 1 - blockIdx.z;  // the longest first
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * 16;
    const int row = tile * TILE + warp_row + lane / 4;
    const Head<const bf16> k = d.k(a.qkv, b, kv), v = d.v(a.qkv, b, kv);
    const float scale = d.scale * LOG2_E;

    // A step is one tile of columns that the mask leaves, of one query head (every head of the group
    // if keys are owned).
    const int begin = KEYS ? tile : 0, count = KEYS ? gridDim.z - tile : tile + 1;
    const int steps = count * (KEYS ? d.group() : 1);
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

    float row_lse[2] = {}, row_delta[2] = {};  // of owned queries
    for (int r = 0; !KEYS && r < 2; r++) {
        const int64_t at = d.row(b, first_head) + min(row + 8 * r, d.T - 1);
        row_lse[r] = a.lse[at], row_delta[r] = a.delta[at];
    }
    float acc1[1][HS / 2] = {}, acc2[1][HS / 2] = {};  // dk and dv, or dq alone
    for (int step = 0; step < steps; step++) {
        load_stage(step + 1);
        cp_commit();
        cp_wait<1>();
        __syncthreads();
        const Stage<HS> in = stage(step);
        const bool diagonal = (begin + step % count) == tile;
        float p[1][TILE / 2], ds[1][TILE / 2];
        scores<HS, 1>(own1, warp_row, in.tile1, p);
        scores<HS, 1>(own2, warp_row, in.tile2, ds);  // dp
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) {
            const int col = n * 8 + fragment_col();
            float2 lse{}, delta{};
            if (KEYS) lse = load_shared2(in.lse + col * 4), delta = load_shared2(in.delta + col * 4);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float l = KEYS ? (i % 2 ? lse.y : lse.x) : row_lse[i / 2];
                const float dl = KEYS ? (i % 2 ? delta.y : delta.x) : row_delta[i / 2];
                const int own = row + i / 2 * 8, other = tile * TILE + col + i % 2;
                const bool masked = diagonal && (KEYS ? own > other : other > own);
                float &p_i = p[0][n * 4 + i], &ds_i = ds[0][n * 4 + i];
                p_i = masked ? 0.0f : fast_exp2(p_i * scale - l * LOG2_E);
                ds_i = p_i * (ds_i - dl);
            }
        }
        if (KEYS) accumulate<HS, 1>(p, in.tile2, acc2);
        accumulate<HS, 1>(ds, in.tile1, acc1);
        __syncthreads();  // the stage may be overwritten
    }
    const int top = tile * TILE + warp_row;
    write<HS>(KEYS ? d.k(a.dqkv, b, kv) : d.q(a.dqkv, b, first_head), top, d.T, acc1[0], d.scale, d.scale);
    if (KEYS) write<HS>(d.v(a.dqkv, b, kv), top, d.T, acc2[0], 1, 1);
}

template <int HS>
void forward(const AttentionShape& s, const void* qkv, void* out, float* lse, cudaStream_t stream) {
    const dim3 grid(unsigned(s.NH), unsigned(s.B), blocks(s.T, FORWARD_ROWS));
    const int shared = (2 + FORWARD_TILES) * Tile<HS>::BYTES;
    launch("attention", forward_kernel<HS>, grid, THREADS, shared, stream, Heads(s),
           static_cast<const bf16*>(qkv), static_cast<bf16*>(out), lse);
}

template <int HS>
void backward(const AttentionShape& s, const void* qkv, const void* out, const float* lse, const void* dout,
              void* dqkv, void* workspace, cudaStream_t stream) {
    const auto args = simple::with_delta<bf16>(s, qkv, out, lse, dout, dqkv, workspace, stream);
    const dim3 keys(unsigned(s.NKV), unsigned(s.B), blocks(s.T, TILE));
    const dim3 queries(unsigned(s.NH), keys.y, keys.z);
    const int shared = 2 * Tile<HS>::BYTES + 2 * Stage<HS>::BYTES;
    launch("attention", backward_kernel<HS, Owner::Keys>, keys, THREADS, shared, stream, Heads(s), args);
    launch("attention", backward_kernel<HS, Owner::Queries>, queries, THREADS, shared, stream, Heads(s),
           args);
}

}  // namespace mma

// -----------------------------------------------------------------------------------------------------------
// The choice of an implementation

bool tensor_cores_fit(const AttentionShape& s) {
    return s.format == Format::BF16 && (s.HS == 64 || s.HS == 128);
}

struct Implementation {
    decltype(&sm90::attention_forward) forward;
    decltype(&sm90::attention_backward) backward;
};
Implementation choose(const AttentionShape& s, AttentionKernel wanted) {
    using K = AttentionKernel;
    const bool fp32 = s.format == Format::F32, fits = tensor_cores_fit(s),
               hopper = fits && device_attribute(cudaDevAttrComputeCapabilityMajor, 9) == 9;
    if (s.HS % 8 != 0 || s.HS > 256 || s.NH % s.NKV != 0 || !(fp32 || s.format == Format::BF16))
        throw Error(
            "Attention on the GPU needs FP32 or BF16, a head size that is a multiple of 8 up to 256, "
            "and query heads that are a multiple of the key/value heads; change config.json.");
    if (wanted == K::Best) wanted = hopper ? K::Hopper : fits ? K::TensorCores : K::Simple;
    require(wanted == K::Simple || (wanted == K::Hopper ? hopper : fits),
            "attention for another GPU or shape");
    if (wanted == K::Hopper) return {sm90::attention_forward, sm90::attention_backward};
    if (wanted == K::Simple && fp32) return {simple::forward<float>, simple::backward<float>};
    if (wanted == K::Simple) return {simple::forward<bf16>, simple::backward<bf16>};
    if (s.HS == 64) return {mma::forward<64>, mma::backward<64>};
    return {mma::forward<128>, mma::backward<128>};
}

}  // namespace

void attention_forward(const AttentionShape& s, const void* qkv, void* out, float* lse, cudaStream_t stream,
                       AttentionKernel kernel) {
    if (stream != DRY_RUN) choose(s, kernel).forward(s, qkv, out, lse, stream);
}

void attention_backward(const AttentionShape& s, const void* qkv, const void* out, const float* lse,
                        const void* dout, void* dqkv, void* workspace, cudaStream_t stream,
                        AttentionKernel kernel) {
    if (stream != DRY_RUN) choose(s, kernel).backward(s, qkv, out, lse, dout, dqkv, workspace, stream);
}

size_t attention_workspace(const AttentionShape& s) {  // bytes: delta, or what the Hopper kernels need
    const size_t delta = static_cast<size_t>(round_up(s.B * s.NH * s.T * int64_t(sizeof(float)), 256));
    return std::max(delta, tensor_cores_fit(s) ? sm90::attention_workspace(s) : 0);
}

}  // namespace coat
