// gpu/attention.cu - causal attention forward and backward: the choice of an implementation, and the one
// that runs on every GPU, in FP32 and BF16.
//
// The algorithm is flash attention (FlashAttention-2, arXiv 2307.08691), which never stores the T x T scores.
//
// Forward: a block keeps a tile of queries and loops over tiles of keys and values. The softmax of a
// row needs its maximum and its sum over all keys, so it is computed "online": with a running maximum
// m and a running sum l. When a tile of keys raises m, l and the output so far are multiplied by
// exp(m_old - m_new). At the end the output is divided by l. One value of each query is saved for backward:
// the log-sum-exp, lse = m + log(l).
//
// Backward recomputes p = exp(s - lse) from q, k and lse. delta = rowsum(dout * out) is one value of each
// query:
//   dv = p^T dout,  dp = dout v^T,  ds = p * (dp - delta),  dq = ds k / sqrt(HS),  dk = ds^T q / sqrt(HS).
// dk and dv are sums over queries, dq is a sum over keys. Atomic additions would make the bits depend on
// timing, so there are two passes. In the first a block owns a tile of keys and loops over queries, for dk
// and dv. In the second it owns a tile of queries and loops over keys, for dq. One kernel is compiled for
// both, because they differ only in which side is the rows: see KEYS. The price is that s and dp are computed
// twice.
#include "../coat.h"
#include "attention_common.cuh"
#include "layers.h"

#include <cuda_pipeline.h>

namespace coat::gpu {
namespace {

using namespace flash;

// One head of one sequence, (T, HS): its rows are `stride` elements apart.
template <class Real> struct Head {
    Real* data;
    int64_t stride;
    __device__ Real* address(int t, int d) const { return data + t * stride + d; }
};

// Where the heads of a tensor are. b is the number of a sequence, h that of a query head, kv that of a
// key/value head. q(), k() and v() are heads of qkv or of its gradient; out() is one of out or of its
// gradient.
template <class Real> struct Heads : Dims {
    using Dims::Dims;
    __device__ Head<Real> of(const void* x, int heads, int b, int h) const {
        return {plain_view<Real>(x).data + (int64_t(b) * T * heads + h) * HS, int64_t(heads) * HS};
    }
    __device__ Head<Real> q(const void* x, int b, int h) const { return of(x, NH + 2 * NKV, b, h); }
    __device__ Head<Real> k(const void* x, int b, int kv) const { return q(x, b, NH + kv); }
    __device__ Head<Real> v(const void* x, int b, int kv) const { return k(x, b, NKV + kv); }
    __device__ Head<Real> out(const void* x, int b, int h) const { return of(x, NH, b, h); }
};

// -----------------------------------------------------------------------------------------------------------
// Tiles in shared memory

// A tile (ROWS, COLS) in shared memory. COLS is the head size, rounded up; the columns past it are zeros. A
// tile has 16 KiB at most, so that the six tiles of a backward pass fit into the shared memory of every GPU.
// Chunks of 16 bytes are permuted within a row by exclusive or with the row's number. So the eight rows that
// one ldmatrix reads, and the eight chunks of a row that cp.async writes, are in different banks.
template <class Real_, int COLS_> struct Tile {
    using Real = Real_;
    static constexpr int COLS = COLS_, ROW_BYTES = COLS * int(sizeof(Real));
    static constexpr int ROWS = std::min(64, (16 << 10) / ROW_BYTES), BYTES = ROWS * ROW_BYTES;
    static constexpr int STAGE_BYTES = 2 * BYTES + 2 * ROWS * 4;  // two tiles and their statistics
    static constexpr int THREADS = ROWS / 16 * WARP;              // a warp owns 16 rows of a tile
    static constexpr int CHUNK_SIZE = 16 / int(sizeof(Real));     // elements of a chunk
    uint32_t base;
    __device__ uint32_t address(int row, int col) const {
        return base + row * ROW_BYTES + (((col / CHUNK_SIZE) ^ (row & 7)) * 16) +
               col % CHUNK_SIZE * uint32_t(sizeof(Real));
    }
};

// cp.async copies 16 bytes from global to shared memory in the background. If not `live` it writes zeros.
__device__ void cp_async16(uint32_t to, const void* from, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0));
}

// Starts to copy a tile whose first row is row `first` of the head.
template <class TileT>
__device__ void load_tile(TileT tile, const Dims& d, Head<typename TileT::Real> head, int first) {
    constexpr int CHUNKS = TileT::COLS / TileT::CHUNK_SIZE;
    for (int i = threadIdx.x; i < TileT::ROWS * CHUNKS; i += TileT::THREADS) {
        const int row = i / CHUNKS, col = i % CHUNKS * TileT::CHUNK_SIZE;
        const bool live = first + row < d.T && col < d.HS;
        cp_async16(tile.address(row, col), live ? head.address(first + row, col) : head.data, live);
    }
}

// -----------------------------------------------------------------------------------------------------------
// GEMMs of a warp. Their results are spread over its registers as attention_common.cuh describes.
//
// BF16: tensor cores through mma.sync m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16").
// FP32: the same layout on CUDA cores, because tensor cores would round the operands.

// A 16 x 16 operand, spread over the registers of a warp: two BF16 values in each register. In a right
// operand r[0] and r[1] are the first 8 columns, r[2] and r[3] the others.
struct Fragment {
    uint32_t r[4];
};

// One instruction, with which a warp loads a Fragment from shared memory: each lane gives the address of a
// row of 16 bytes.
template <bool TRANSPOSED> __device__ Fragment ldmatrix(uint32_t address) {
    Fragment x;
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x.r[0]), "=r"(x.r[1]), "=r"(x.r[2]), "=r"(x.r[3])
                     : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x.r[0]), "=r"(x.r[1]), "=r"(x.r[2]), "=r"(x.r[3])
                     : "r"(address));
    return x;
}
// A left operand or, transposed, a right one from a tile (k, n).
template <bool TRANSPOSED, class TileT> __device__ Fragment load(TileT tile, int row, int col) {
    const int lane = threadIdx.x % WARP;
    return ldmatrix<TRANSPOSED>(tile.address(row + lane % 16, col + lane / 16 * 8));
}
// A right operand from a tile (n, k).
template <class TileT> __device__ Fragment load_right(TileT tile, int n, int k) {
    const int lane = threadIdx.x % WARP;
    return ldmatrix<false>(tile.address(n + lane % 8 + lane / 16 * 8, k + lane / 8 % 2 * 8));
}

// c (16 x 16) += a (16 x 16) b (16 x 16), as two instructions of 8 columns.
__device__ void mma(float* c, const Fragment& a, const Fragment& b) {
    for (int i = 0; i < 2; i++)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[4 * i]), "+f"(c[4 * i + 1]), "+f"(c[4 * i + 2]), "+f"(c[4 * i + 3])
            : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2 * i]), "r"(b.r[2 * i + 1]));
}

// s (16, ROWS) += 16 rows of x (_, COLS), from `row` on, times y (ROWS, COLS)^T.
template <int COLS, int R>
__device__ void scores(Tile<bf16, COLS> x, int row, Tile<bf16, COLS> y, float (&s)[R]) {
#pragma unroll
    for (int k = 0; k < COLS; k += 16) {
        const Fragment a = load<false>(x, row, k);
#pragma unroll
        for (int n = 0; n < y.ROWS; n += 16) mma(&s[n / 2], a, load_right(y, n, k));
    }
}
template <int COLS, int R>
__device__ void scores(Tile<float, COLS> x, int row, Tile<float, COLS> y, float (&s)[R]) {
    for (int k = 0; k < COLS; k += 4) {
        float4 a[2];
        for (int i = 0; i < 2; i++) a[i] = shared<float4>(x.address(row + i * 8 + threadIdx.x % WARP / 4, k));
#pragma unroll
        for (int i = 0; i < R / 2; i++) {  // each column of s that this lane holds
            const float4 b = shared<float4>(y.address(i / 2 * 8 + fragment_col() + i % 2, k));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float& sum = s[i / 2 * 4 + j * 2 + i % 2];
                sum = fmaf(a[j].x, b.x, fmaf(a[j].y, b.y, fmaf(a[j].z, b.z, fmaf(a[j].w, b.w, sum))));
            }
        }
    }
}

// acc (16, COLS) += p (16, ROWS) times y (ROWS, COLS). In BF16 p is rounded; 16 columns of it then have the
// layout of a left operand.
template <int COLS, int P, int R>
__device__ void accumulate(const float (&p)[P], Tile<bf16, COLS> y, float (&acc)[R]) {
#pragma unroll
    for (int k = 0; k < y.ROWS; k += 16) {
        Fragment a;
        for (int i = 0; i < 4; i++) a.r[i] = pack_bf16(p[k / 2 + i * 2], p[k / 2 + i * 2 + 1]);
#pragma unroll
        for (int n = 0; n < COLS; n += 16) mma(&acc[n / 2], a, load<true>(y, k, n));
    }
}
template <int COLS, int P, int R>
__device__ void accumulate(const float (&p)[P], Tile<float, COLS> y, float (&acc)[R]) {
#pragma unroll
    for (int k = 0; k < y.ROWS; k++) {
        float a[2];  // column k of p in the two rows, from the lane of the quad that holds it
        for (int i = 0; i < 2; i++) a[i] = __shfl_sync(ALL_LANES, p[k / 8 * 4 + i * 2 + k % 2], k % 8 / 2, 4);
#pragma unroll
        for (int n = 0; n < COLS; n += 8) {
            const float2 b = shared<float2>(y.address(k, n + fragment_col()));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float* const sum = &acc[n / 2 + i * 2];
                sum[0] = fmaf(a[i], b.x, sum[0]);
                sum[1] = fmaf(a[i], b.y, sum[1]);
            }
        }
    }
}

// Writes 16 rows of a head, from `row` on: the accumulators times factor0 (the first 8 rows) or factor1.
template <class Real, int R>
__device__ void write(const Dims& d, Head<Real> head, int row, const float (&acc)[R], float factor0,
                      float factor1) {
#pragma unroll
    for (int i = 0; i < R; i += 2) {
        const int t = row + threadIdx.x % WARP / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + fragment_col();
        const float factor = i / 2 % 2 ? factor1 : factor0, x = acc[i] * factor, y = acc[i + 1] * factor;
        if (t >= d.T || col >= d.HS) continue;
        if constexpr (sizeof(Real) == 4) *reinterpret_cast<float2*>(head.address(t, col)) = {x, y};
        else *reinterpret_cast<uint32_t*>(head.address(t, col)) = pack_bf16(x, y);
    }
}

// -----------------------------------------------------------------------------------------------------------
// Forward

// The grid is (NH, B, tiles of queries). The last tile, which sees the most keys, goes first. Rows past T are
// zeros in shared memory. What follows from them is zero or is not written, so the causal mask is the only
// mask.
template <class TileT>
__global__ void __launch_bounds__(TileT::THREADS)
    attention_forward_kernel(Heads<typename TileT::Real> d, const void* qkv, void* out, float* lse) {
    const uint32_t base = dynamic_shared_memory(1);
    const TileT keys{base}, values{base + TileT::BYTES}, queries{base + 2 * TileT::BYTES};
    const int h = blockIdx.x, b = blockIdx.y, kv = h / d.heads_per_kv();
    const int first_query = (gridDim.z - 1 - blockIdx.z) * TileT::ROWS, warp_row = threadIdx.x / WARP * 16;
    const int lane = threadIdx.x % WARP, row = first_query + warp_row + lane / 4;
    const auto k = d.k(qkv, b, kv), v = d.v(qkv, b, kv);
    const float scale = d.scale * LOG2_E;

    // The loop goes from the last tile of keys that these queries see back to the first.
    int first_key = (min(first_query + TileT::ROWS, d.T) - 1) / TileT::ROWS * TileT::ROWS;
    load_tile(queries, d, d.q(qkv, b, h), first_query);
    load_tile(keys, d, k, first_key);
    __pipeline_commit();
    float acc[TileT::COLS / 2] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, shrink[2];
    for (; first_key >= 0; first_key -= TileT::ROWS) {
        // Whether this warp sees some of the keys of the tile.
        const bool sees_keys = first_key < first_query + warp_row + 16;
        __pipeline_wait_prior(0);
        __syncthreads();  // keys have arrived, values may be overwritten
        load_tile(values, d, v, first_key);
        __pipeline_commit();
        float s[TileT::ROWS / 2] = {};
        if (sees_keys) scores(queries, warp_row, keys, s);
        __pipeline_wait_prior(0);
        __syncthreads();  // values have arrived, keys may be overwritten
        if (first_key > 0) load_tile(keys, d, k, first_key - TileT::ROWS);
        __pipeline_commit();
        if (!sees_keys) continue;
        if (first_key + TileT::ROWS - 1 > first_query + warp_row) mask(s, first_key - row);
        softmax(s, max, sum, shrink, scale);
#pragma unroll
        for (int i = 0; i < TileT::COLS / 2; i++) acc[i] *= shrink[i / 2 % 2];
        accumulate(s, values, acc);
    }
    for (int r = 0; r < 2; r++) {
        const int query = row + r * 8;
        sum[r] = quad_sum(sum[r]);
        if (lane % 4 == 0 && query < d.T)
            lse[(int64_t(b) * d.NH + h) * d.T + query] = max[r] * d.scale + logf(sum[r]);
    }
    write(d, d.out(out, b, h), first_query + warp_row, acc, 1.0f / sum[0], 1.0f / sum[1]);
}

// -----------------------------------------------------------------------------------------------------------
// Backward

__device__ float element(float2 two, int i) { return i == 0 ? two.x : two.y; }

// KEYS: in this pass a block owns a tile of keys and computes dk and dv; else it owns a tile of queries and
// computes dq. The owned tile is the rows of s and dp. The grid is (NKV or NH, B, tiles of owned rows).
//
// Each step loads a tile of the other side into a stage: q and dout (parts 0 and 1) and their QueryStatistics
// (part 2), or k and v. There are two stages: one is loaded while the other is used.
template <class TileT, bool KEYS>
__global__ void __launch_bounds__(TileT::THREADS)
    attention_backward_kernel(Heads<typename TileT::Real> d, const void* qkv, const void* gradient,
                              void* dqkv, QueryStatistics statistics) {
    const uint32_t base = dynamic_shared_memory(1);
    const TileT own1{base}, own2{base + TileT::BYTES};  // the owned k and v, or q and dout
    auto part = [&](int s, int i) { return base + (2 + i) * TileT::BYTES + s % 2 * TileT::STAGE_BYTES; };
    const int b = blockIdx.y, kv = KEYS ? blockIdx.x : blockIdx.x / d.heads_per_kv();
    const int first_head = KEYS ? kv * d.heads_per_kv() : blockIdx.x;
    const int tile = KEYS ? blockIdx.z : gridDim.z - 1 - blockIdx.z;  // the longest first
    // The first row of this warp, and of this lane, in the owned tile.
    const int warp_row = threadIdx.x / WARP * 16, row = warp_row + threadIdx.x % WARP / 4;
    const auto k = d.k(qkv, b, kv), v = d.v(qkv, b, kv);
    const float scale = d.scale * LOG2_E;
    auto statistics_of = [&](int h, int query_tile) {
        return statistics.data + ((int64_t(b) * d.NH + h) * statistics.tiles + query_tile) * 2 * TileT::ROWS;
    };

    // A step has one tile of the other side that the mask leaves, in one query head. If the block owns keys,
    // it goes through all query heads that share them.
    const int begin = KEYS ? tile : 0, count = KEYS ? gridDim.z - tile : tile + 1;
    const int steps = count * (KEYS ? d.heads_per_kv() : 1);
    auto load_stage = [&](int step) {
        if (step >= steps) return;
        const int h = first_head + step / count, other_tile = begin + step % count;
        load_tile(TileT{part(step, 0)}, d, KEYS ? d.q(qkv, b, h) : k, other_tile * TileT::ROWS);
        load_tile(TileT{part(step, 1)}, d, KEYS ? d.out(gradient, b, h) : v, other_tile * TileT::ROWS);
        float* const to = &shared<float>(part(step, 2) + threadIdx.x * 4);
        if (KEYS) __pipeline_memcpy_async(to, statistics_of(h, other_tile) + threadIdx.x, 4);
    };
    load_tile(own1, d, KEYS ? k : d.q(qkv, b, first_head), tile * TileT::ROWS);
    load_tile(own2, d, KEYS ? v : d.out(gradient, b, first_head), tile * TileT::ROWS);
    load_stage(0);
    __pipeline_commit();

    float own_lse[2] = {}, own_delta[2] = {};  // those of this lane, if queries are owned
    for (int r = 0; !KEYS && r < 2; r++) {
        own_lse[r] = statistics_of(first_head, tile)[row + 8 * r];
        own_delta[r] = statistics_of(first_head, tile)[TileT::ROWS + row + 8 * r];
    }
    float acc1[TileT::COLS / 2] = {}, acc2[TileT::COLS / 2] = {};  // dk and dv, or dq alone
    for (int step = 0; step < steps; step++) {
        load_stage(step + 1);
        __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        const TileT in1{part(step, 0)}, in2{part(step, 1)};
        const bool diagonal = begin + step % count == tile;
        float p[TileT::ROWS / 2] = {}, ds[TileT::ROWS / 2] = {};
        scores(own1, warp_row, in1, p);
        scores(own2, warp_row, in2, ds);  // dp
        // The statistics of the queries in this lane's columns. (Loaded in the next loop, registers would
        // spill.)
        float2 lse[TileT::ROWS / 8], delta[TileT::ROWS / 8];
#pragma unroll
        for (int n = 0; KEYS && n < TileT::ROWS / 8; n++) {
            const uint32_t address = part(step, 2) + (n * 8 + fragment_col()) * 4;
            lse[n] = shared<float2>(address);
            delta[n] = shared<float2>(address + TileT::ROWS * 4);
        }
#pragma unroll
        for (int n = 0; n < TileT::ROWS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float lse_i = KEYS ? element(lse[n], i % 2) : own_lse[i / 2];
                const float delta_i = KEYS ? element(delta[n], i % 2) : own_delta[i / 2];
                const int own = row + i / 2 * 8, other = n * 8 + fragment_col() + i % 2;
                const bool masked = diagonal && (KEYS ? own > other : other > own);
                float &p_i = p[n * 4 + i], &ds_i = ds[n * 4 + i];
                p_i = masked ? 0.0f : fast_exp2(p_i * scale - lse_i);
                ds_i = p_i * (ds_i - delta_i);
            }
        }
        if (KEYS) accumulate(p, in2, acc2);
        accumulate(ds, in1, acc1);
        __syncthreads();  // from here on the stage may be overwritten
    }
    const int first_row = tile * TileT::ROWS + warp_row;
    write(d, KEYS ? d.k(dqkv, b, kv) : d.q(dqkv, b, first_head), first_row, acc1, d.scale, d.scale);
    if (KEYS) write(d, d.v(dqkv, b, kv), first_row, acc2, 1, 1);
}

template <class TileT>
void forward(const AttentionShape& s, const void* qkv, void* out, float* lse, float* out_amax_to_raise,
             cudaStream_t stream) {
    const dim3 grid(unsigned(s.NH), unsigned(s.B), block_count(s.T, TileT::ROWS));
    launch("attention_forward", attention_forward_kernel<TileT>, grid, TileT::THREADS, 3 * TileT::BYTES,
           stream, s, qkv, out, lse);
    const TensorRef result{out, s.B * s.T, s.NH * s.HS, TensorFormat{s.format}};
    if (out_amax_to_raise) compute_amax(lazy_load(result), out_amax_to_raise, stream);
}

template <class TileT>
void backward(const AttentionShape& s, const AttentionBackward& tensors, cudaStream_t stream) {
    const QueryStatistics statistics(s, TileT::ROWS, tensors.workspace);
    launch("attention_backward", attention_prepare_kernel<typename TileT::Real, TileT::COLS, TileT::ROWS>,
           statistics.grid(s), PREPARE_THREADS, 0, stream, s, statistics, tensors.out, tensors.dout,
           tensors.lse, nullptr, 0);
    auto launch_pass = [&](auto kernel, int64_t heads) {
        const dim3 grid(unsigned(heads), unsigned(s.B), unsigned(statistics.tiles));
        launch("attention_backward", kernel, grid, TileT::THREADS, 2 * TileT::BYTES + 2 * TileT::STAGE_BYTES,
               stream, s, tensors.qkv, tensors.dout, tensors.dqkv, statistics);
    };
    launch_pass(attention_backward_kernel<TileT, true>, s.NKV);
    launch_pass(attention_backward_kernel<TileT, false>, s.NH);
    // On Hopper the kernel itself undoes RoPE and finds the amax; here a pass over dqkv does.
    const TensorRef dqkv{tensors.dqkv, s.B * s.T, s.qkv_cols(), TensorFormat{s.format}};
    const Rope positions{tensors.rope_table, s.T, s.HS, /*rotated_cols=*/(s.NH + s.NKV) * s.HS};
    if (tensors.rope_table) rope(positions, dqkv, /*inverse=*/true, tensors.dqkv_amax_to_raise, stream);
    else if (tensors.dqkv_amax_to_raise) compute_amax(lazy_load(dqkv), tensors.dqkv_amax_to_raise, stream);
}

template <class TileT> int64_t workspace_bytes(const AttentionShape& s) {
    return QueryStatistics(s, TileT::ROWS, nullptr).all_tiles(s) * 2 * TileT::ROWS * sizeof(float);
}

// -----------------------------------------------------------------------------------------------------------
// The choice of an implementation

template <class Real, int COLS>
constexpr AttentionKernels ANY_GPU{.forward = forward<Tile<Real, COLS>>,
                                   .backward = backward<Tile<Real, COLS>>,
                                   .workspace_bytes = workspace_bytes<Tile<Real, COLS>>};

AttentionKernels fastest(const AttentionShape& s) {
    require(s.HS % 8 == 0 && s.HS <= 128 && s.NH % s.NKV == 0 &&
                (s.format == Format::FP32 || s.format == Format::BF16),
            "a shape or format that common/known_models.h's require_supported() refuses");
    const bool fits = s.format == Format::BF16 && (s.HS == 64 || s.HS == 128);
    const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor, 9) == 9;
    return fits && hopper ? hopper_attention(s) : any_gpu_attention(s);
}

}  // namespace

AttentionKernels any_gpu_attention(const AttentionShape& s) {
    if (s.format == Format::FP32)
        return ANY_GPU<float, 128>;  // FP32 is for comparisons: one kernel for all head sizes compiles faster
    return s.HS <= 64 ? ANY_GPU<bf16, 64> : ANY_GPU<bf16, 128>;
}

void attention_forward(const AttentionShape& s, const void* qkv, void* out, float* lse,
                       float* out_amax_to_raise, cudaStream_t stream) {
    unless_dry_run(stream, "attention_forward",
                   [&] { fastest(s).forward(s, qkv, out, lse, out_amax_to_raise, stream); });
}

void attention_backward(const AttentionShape& s, const AttentionBackward& tensors, cudaStream_t stream) {
    unless_dry_run(stream, "attention_backward", [&] { fastest(s).backward(s, tensors, stream); });
}

int64_t attention_workspace_bytes(const AttentionShape& s) { return fastest(s).workspace_bytes(s); }

}  // namespace coat::gpu
