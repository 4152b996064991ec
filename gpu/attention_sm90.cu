// attention_sm90.cu - causal attention for Hopper: the same algorithm as attention.cu, on wgmma and TMA.
//
// After FlashAttention-3 (arXiv 2407.08608). A block is one producer and two or three consumer warpgroups. The producer's thread asks the
// copy engine (TMA) for tiles; consumers multiply them (wgmma, asynchronous) and do the softmax meanwhile. They meet at
// mbarriers: `full` says that a tile has arrived, `empty` that it may be overwritten.
//   Forward: a consumer warpgroup owns 64 queries. Inside it, the scores of the next tile of keys are computed while this tile's p v is; and
//     warpgroups take turns in issuing products, so that one's exponentials run under another's products.
//   Backward: a block owns 128 keys and walks over tiles of queries, from the diagonal on. Scores are made transposed (keys x queries), so
//     that p and ds are in registers just as the products for dv and dk want them; ds goes through shared memory only for dq.
//     Every block adds its part of dq to FP32 sums in global memory, in a fixed order: see dq_writer.
#include <cuda.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <atomic>

#include "attention_sm90.cuh"

namespace coat::sm90 {
namespace {

using bf16 = __nv_bfloat16;

// wgmma and setmaxnreg exist on sm_90a alone. Elsewhere the kernels are empty and attention.cu does not launch them; built for sm_90 without the
// a, they stop rather than do nothing.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HOPPER = true;
#else
constexpr bool HOPPER = false;
#endif

constexpr float LOG2E = 1.44269504f;
constexpr int WARP = 32, WARPGROUP = 128;
constexpr int PANEL = 64;              // elements of a 128-byte row: what TMA's and wgmma's 128-byte swizzle works on
constexpr int BOX = 64;                // rows that one TMA instruction moves
constexpr int BOX_BYTES = BOX * PANEL * 2;

struct Dims {
    int B, T, NH, NKV;
    float scale;  // 1 / sqrt(HS)
    __host__ __device__ int group() const { return NH / NKV; }  // query heads that share a key/value head
};

Dims dims(const AttentionShape& s) { return {int(s.B), int(s.T), int(s.NH), int(s.NKV), 1.0f / std::sqrt(float(s.HS))}; }

// ---------------------------------------------------------------------------------------------------------------------
// Hopper's instructions (PTX ISA, sections on mbarrier, cp.async.bulk and wgmma)

__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

struct Barrier {
    uint32_t address;
    __device__ void init(int arrivals) const { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals)); }
    __device__ void arrive() const { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory"); }
    __device__ void arrive_and_expect(int bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    }
    __device__ void wait(uint32_t parity) const {
        asm volatile(
            "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}"
            ::"r"(address), "r"(parity) : "memory");
    }
};

// Position in a ring of stages. The barrier's phase flips each time round.
template <int STAGES>
struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ void sync_named(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ void arrive_named(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
template <int REGISTERS> __device__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS> __device__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

__device__ void tma_load(uint32_t to, const CUtensorMap& map, Barrier full, int col, int row, int b) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(to), "l"(&map), "r"(full.address), "r"(col), "r"(row), "r"(b) : "memory");
}
__device__ void tma_store(const CUtensorMap& map, uint32_t from, int col, int row, int b) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(&map), "r"(from), "r"(col), "r"(row), "r"(b) : "memory");
}
__device__ void bulk_load(uint32_t to, const void* from, int bytes, Barrier full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(full.address) : "memory");
}
__device__ void bulk_store(void* to, uint32_t from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ void bulk_add(float* to, uint32_t from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // shared memory may be reused
__device__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }            // global memory is written

// A matrix in shared memory as wgmma sees it: 128-byte swizzle, eight rows of 128 bytes are 1024. `panel_stride` is the distance of
// one panel of 64 columns from the next, where the contiguous dimension is not the one summed over.
__device__ uint64_t descriptor(uint32_t address, int panel_stride = 16) {
    return uint64_t(address >> 4 & 0x3FFF) | uint64_t(panel_stride >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

__device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most PENDING groups are in flight. What was in flight until now must not be touched before: the empty statements tie it here.
template <int N>
__device__ void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N>
__device__ void pin(uint32_t (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}
template <int PENDING, class... Registers>
__device__ void wgmma_wait(Registers&... acc) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    (pin(acc), ...);
}

// d (64, N) (+)= a (64, 16) b (16, N), a by descriptor or in registers. TA, TB: the dimension that is not summed over is contiguous.
#define LIST16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LIST32 LIST16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LIST64 LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
                      ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define OUT8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define OUT16(d, i) OUT8(d, i), OUT8(d, i + 8)
#define OUT32(d, i) OUT16(d, i), OUT16(d, i + 16)
#define OUT64(d, i) OUT32(d, i), OUT32(d, i + 32)
#define WGMMA(N, REGISTERS, A, B, P, TRANSPOSES)                                                                    \
    "{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 " \
    "{" LIST##REGISTERS "}, " A ", %" #B ", p, 1, 1, " TRANSPOSES ";\n}"
#define DEFINE_WGMMA(N, R, I0, I1, I2, I3, I4, I5, I6)                                                                                  \
    template <bool TA, bool TB>                                                                                                         \
    __device__ void wgmma(float (&d)[R], uint64_t a, uint64_t b, bool add) {                                                            \
        asm volatile(WGMMA(N, R, "%" #I0, I1, I2, "%" #I3 ", %" #I4)                                                                    \
                     : OUT##R(d, 0) : "l"(a), "l"(b), "r"(int(add)), "n"(int(TA)), "n"(int(TB)));                                       \
    }                                                                                                                                   \
    template <bool TB>                                                                                                                  \
    __device__ void wgmma(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool add) {                                                \
        asm volatile(WGMMA(N, R, "{%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}", I4, I5, "%" #I6)                                           \
                     : OUT##R(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(int(TB)));                 \
    }
DEFINE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
DEFINE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
DEFINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)

// ---------------------------------------------------------------------------------------------------------------------
// Tiles and products. A tile (rows, HS) lies in shared memory as panels of 64 columns, each (rows, 64) with 128-byte rows, swizzled.
// Of an accumulator (64, N) thread t holds, at index i, row t / 32 * 16 + t % 32 / 4 + (i & 2) * 4 and column i / 4 * 8 + t % 4 * 2 + (i & 1).

__device__ int fragment_row() { return threadIdx.x % WARPGROUP / WARP * 16 + threadIdx.x % WARP / 4; }
__device__ int fragment_col() { return threadIdx.x % 4 * 2; }

// d (64, N) = a (64, HS) b (N, HS)^T; a is rows of a tile of ROWS_A, b a tile of N rows.
template <int HS, int ROWS_A, int R>
__device__ void scores(float (&d)[R], uint32_t a, uint32_t b) {
    constexpr int N = R * 2;
#pragma unroll
    for (int k = 0; k < HS; k += 16) {
        const uint32_t inside = k % PANEL * 2;
        wgmma<false, false>(d, descriptor(a + k / PANEL * ROWS_A * 128 + inside), descriptor(b + k / PANEL * N * 128 + inside), k > 0);
    }
}

// d (64, HS) += p (64, ROWS), in registers, times b (ROWS, HS)
template <int ROWS, int R>
__device__ void accumulate(float (&d)[R], const uint32_t (&p)[ROWS / 16][4], uint32_t b, bool add) {
#pragma unroll
    for (int k = 0; k < ROWS; k += 16) wgmma<true>(d, p[k / 16], descriptor(b + k * 128, ROWS * 128), add || k > 0);
}

__device__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
}

// Accumulators of 16 neighbouring columns, rounded, are the fragment of `a` that the next product wants.
template <int R>
__device__ void as_a(uint32_t (&a)[R / 8][4], const float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R / 2; i++) a[i / 4][i % 4] = pack(d[2 * i], d[2 * i + 1]);
}

__device__ void store_fragment(uint32_t address, const uint32_t (&a)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}

// Rows (64 of ROWS, N) of this warpgroup to a tile in shared memory, in BF16.
template <int ROWS, int K>
__device__ void store_tile(uint32_t tile, const uint32_t (&a)[K][4]) {
    const int lane = threadIdx.x % WARP, row = threadIdx.x % WARPGROUP / WARP * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int chunk = k % 4 * 2 + lane / 16;  // of 16 bytes
        store_fragment(tile + k / 4 * ROWS * 128 + row * 128 + ((chunk ^ (row & 7)) * 16), a[k]);
    }
}

// A tile of ROWS rows, from (row, col) of sequence b on; rows beyond T become zeros.
template <int HS, int ROWS>
__device__ void load_tile(uint32_t to, const CUtensorMap& map, Barrier full, int col, int row, int b) {
#pragma unroll
    for (int panel = 0; panel < HS / PANEL; panel++)
#pragma unroll
        for (int box = 0; box < ROWS / BOX; box++)
            tma_load(to + (panel * (ROWS / BOX) + box) * BOX_BYTES, map, full, col + panel * PANEL, row + box * BOX, b);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

template <int HS_, int CONSUMERS_>
struct Forward {
    static constexpr int HS = HS_, CONSUMERS = CONSUMERS_, QUERIES = CONSUMERS * 64, KEYS = 128, STAGES = 2;
    static constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
    static constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160, PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
    static constexpr int Q_BYTES = QUERIES * HS * 2, KV_BYTES = KEYS * HS * 2;
    // shared memory, from a multiple of 1024 on
    static constexpr int Q = 0, K = Q + Q_BYTES, V = K + STAGES * KV_BYTES, O = V + STAGES * KV_BYTES, BARRIERS = O + Q_BYTES;
    static constexpr int SHARED = BARRIERS + (2 + 4 * STAGES) * 8 + 16 + 1024;
};

// Blocks take their work from a counter, so that no multiprocessor idles at the end: tiles with the most keys first, but a section of heads
// at a time, whose keys and values fit in the L2 cache.
struct Work {
    int tiles, heads, section;  // tiles of queries a head, heads in all, heads in a section
    __host__ __device__ int total() const { return tiles * heads; }
    __device__ void find(int item, int& tile, int& head) const {
        const int first = item / (section * tiles) * section, here = min(section, heads - first), i = item - first * tiles;
        tile = tiles - 1 - i / here, head = first + i % here;
    }
};

// One counter for each forward pass in flight, used in turn; the last block to leave sets it back to zero.
struct Counter {
    int next, left;
};
constexpr int COUNTERS = 256;
__device__ Counter counters[COUNTERS];

int next_counter() {
    static std::atomic<unsigned> launches{0};
    return int(launches++ % COUNTERS);
}

template <class F>
struct ForwardBarriers {
    uint32_t base;
    __device__ Barrier q_full() const { return {base}; }
    __device__ Barrier q_empty() const { return {base + 8}; }
    __device__ Barrier k_full(int stage) const { return {base + 16 + stage * 32}; }
    __device__ Barrier k_empty(int stage) const { return {base + 24 + stage * 32}; }
    __device__ Barrier v_full(int stage) const { return {base + 32 + stage * 32}; }
    __device__ Barrier v_empty(int stage) const { return {base + 40 + stage * 32}; }
    __device__ uint32_t item() const { return base + 16 + F::STAGES * 32; }  // not a barrier: which item q belongs to

    __device__ void init() const {
        constexpr int WARPS = F::CONSUMERS * 4;
        q_full().init(1), q_empty().init(WARPS);
        for (int i = 0; i < F::STAGES; i++) k_full(i).init(1), k_empty(i).init(WARPS), v_full(i).init(1), v_empty(i).init(WARPS);
        fence_barrier_init();
    }
};

// A warp, all of it, is done with what the barrier guards.
__device__ void release(Barrier empty) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) empty.arrive();
}

template <class F>
__device__ int key_tiles(const Dims& d, int tile) {
    return min(((tile + 1) * F::QUERIES + F::KEYS - 1) / F::KEYS, (d.T + F::KEYS - 1) / F::KEYS);
}

template <class F>
__device__ void forward_producer(const CUtensorMap& qkv, const ForwardBarriers<F>& at, uint32_t shared, const Dims& d, const Work& work,
                                 Counter* counter) {
    Ring<F::STAGES> ring;
    for (uint32_t parity = 0;; parity ^= 1) {
        const int item = atomicAdd(&counter->next, 1);
        at.q_empty().wait(parity ^ 1);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at.item()), "r"(item) : "memory");
        if (item >= work.total()) break;
        int tile, head;
        work.find(item, tile, head);
        const int b = head / d.NH, h = head % d.NH, kv = h / d.group();
        at.q_full().arrive_and_expect(F::Q_BYTES);
        load_tile<F::HS, F::QUERIES>(shared + F::Q, qkv, at.q_full(), h * F::HS, tile * F::QUERIES, b);
        for (int n = key_tiles<F>(d, tile) - 1; n >= 0; n--, ring.next()) {
            at.k_empty(ring.stage).wait(ring.parity ^ 1);
            at.k_full(ring.stage).arrive_and_expect(F::KV_BYTES);
            load_tile<F::HS, F::KEYS>(shared + F::K + ring.stage * F::KV_BYTES, qkv, at.k_full(ring.stage), (d.NH + kv) * F::HS, n * F::KEYS, b);
            at.v_empty(ring.stage).wait(ring.parity ^ 1);
            at.v_full(ring.stage).arrive_and_expect(F::KV_BYTES);
            load_tile<F::HS, F::KEYS>(shared + F::V + ring.stage * F::KV_BYTES, qkv, at.v_full(ring.stage), (d.NH + d.NKV + kv) * F::HS,
                                      n * F::KEYS, b);
        }
    }
    at.q_full().arrive();  // with an item beyond the last: the consumers leave
    __threadfence();
    if (atomicAdd(&counter->left, 1) == int(gridDim.x) - 1) counter->next = 0, counter->left = 0;
}

// Online softmax of 64 rows: s becomes p against the new maximum; what was added up before is to be shrunk. `scale` includes log2 e. A row
// that has only masked columns so far has maximum -infinity, and p = 0.
template <int R>
__device__ void softmax(float (&s)[R], float (&max)[2], float (&sum)[2], float (&shrink)[2], float scale) {
    float top[2] = {max[0], max[1]}, base[2];
#pragma unroll
    for (int i = 0; i < R; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = quad_max(top[r]);
        base[r] = top[r] == -INFINITY ? 0.0f : top[r] * scale;
        shrink[r] = exp2_fast(max[r] * scale - base[r]);
        max[r] = top[r];
        sum[r] *= shrink[r];
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        s[i] = exp2_fast(s[i] * scale - base[i / 2 % 2]);
        sum[i / 2 % 2] += s[i];
    }
}

// Scores of keys after the query become -infinity: `ahead` is the tile's first key less this thread's first query.
template <int R>
__device__ void mask(float (&s)[R], int ahead) {
#pragma unroll
    for (int i = 0; i < R; i++)
        if (ahead + i / 4 * 8 + fragment_col() + i % 2 > i / 2 % 2 * 8) s[i] = -INFINITY;
}

template <class F>
__device__ void forward_consumer(const CUtensorMap& out, const ForwardBarriers<F>& at, uint32_t shared, const Dims& d, const Work& work,
                                 float* lse) {
    constexpr int HS = F::HS;
    const int warpgroup = threadIdx.x / WARPGROUP, leader = threadIdx.x % WARPGROUP == 0;
    const int my_turn = 1 + warpgroup, next_turn = 1 + (warpgroup + 1) % F::CONSUMERS, own_barrier = 1 + F::CONSUMERS + warpgroup;
    const uint32_t q = shared + F::Q + warpgroup * BOX_BYTES, staged = shared + F::O + warpgroup * BOX_BYTES;
    const float scale = d.scale * LOG2E;
    Ring<F::STAGES> k, v;
    if (warpgroup == F::CONSUMERS - 1) arrive_named(next_turn, 2 * WARPGROUP);  // the first turn is warpgroup 0's

    for (uint32_t parity = 0;; parity ^= 1) {
        at.q_full().wait(parity);
        int item = 0, tile, head;
        if (threadIdx.x % WARP == 0) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(item) : "r"(at.item()) : "memory");
        item = __shfl_sync(~0u, item, 0);
        if (item >= work.total()) break;
        work.find(item, tile, head);
        const int first_row = tile * F::QUERIES + warpgroup * 64, row = first_row + fragment_row();
        auto mask_tile = [&](float (&s)[F::KEYS / 2], int n) {
            if ((n + 1) * F::KEYS - 1 > first_row) mask(s, n * F::KEYS - row);
        };

        float s[F::KEYS / 2], o[HS / 2], max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, shrink[2];
        uint32_t p[F::KEYS / 16][4];
        int n = key_tiles<F>(d, tile) - 1;
        at.k_full(k.stage).wait(k.parity);
        wgmma_fence();
        scores<HS, F::QUERIES>(s, q, shared + F::K + k.stage * F::KV_BYTES);
        wgmma_commit();
        wgmma_wait<0>(s);
        release(at.k_empty(k.stage));
        k.next();
        mask_tile(s, n);
        softmax(s, max, sum, shrink, scale);
        as_a(p, s);
        bool add = false;
        for (n--; n >= 0; n--) {
            at.k_full(k.stage).wait(k.parity);
            sync_named(my_turn, 2 * WARPGROUP);
            wgmma_fence();
            scores<HS, F::QUERIES>(s, q, shared + F::K + k.stage * F::KV_BYTES);
            wgmma_commit();
            at.v_full(v.stage).wait(v.parity);
            wgmma_fence();
            accumulate<F::KEYS>(o, p, shared + F::V + v.stage * F::KV_BYTES, add);
            wgmma_commit();
            add = true;
            arrive_named(next_turn, 2 * WARPGROUP);
            wgmma_wait<1>(s);
            release(at.k_empty(k.stage));
            k.next();
            mask_tile(s, n);
            softmax(s, max, sum, shrink, scale);
            wgmma_wait<0>(o, p);
            release(at.v_empty(v.stage));
            v.next();
            as_a(p, s);
#pragma unroll
            for (int i = 0; i < HS / 2; i++) o[i] *= shrink[i / 2 % 2];
        }
        release(at.q_empty());
        at.v_full(v.stage).wait(v.parity);
        wgmma_fence();
        accumulate<F::KEYS>(o, p, shared + F::V + v.stage * F::KV_BYTES, add);
        wgmma_commit();
        const int b = head / d.NH, h = head % d.NH;
        float inverse[2];
        for (int r = 0; r < 2; r++) {
            sum[r] = quad_sum(sum[r]);
            inverse[r] = 1.0f / sum[r];
            if (threadIdx.x % 4 == 0 && row + 8 * r < d.T) lse[(int64_t(b) * d.NH + h) * d.T + row + 8 * r] = max[r] * d.scale + logf(sum[r]);
        }
        if (leader) bulk_wait_read();  // the tile before this one has left shared memory
        wgmma_wait<0>(o, p);
        release(at.v_empty(v.stage));
        v.next();
#pragma unroll
        for (int i = 0; i < HS / 2; i++) o[i] *= inverse[i / 2 % 2];
        uint32_t result[HS / 16][4];
        as_a(result, o);
        sync_named(own_barrier, WARPGROUP);
        store_tile<F::QUERIES>(staged, result);
        fence_async_shared();
        sync_named(own_barrier, WARPGROUP);
        if (leader && first_row < d.T) {
            for (int panel = 0; panel < HS / PANEL; panel++)
                tma_store(out, staged + panel * F::QUERIES * 128, h * HS + panel * PANEL, first_row, b);
            bulk_commit();
        }
    }
    if (leader) bulk_wait_read();
}

// As many blocks as there are multiprocessors.
template <class F>
__global__ void __launch_bounds__(F::THREADS, 1)
    forward_kernel(const __grid_constant__ CUtensorMap qkv, const __grid_constant__ CUtensorMap out, Dims d, Work work, int counter,
                   float* lse) {
    if (!HOPPER) return __trap();
    extern __shared__ uint8_t raw[];
    const uint32_t shared = (shared_address(raw) + 1023) & ~1023u;
    const ForwardBarriers<F> barriers{shared + F::BARRIERS};
    if (threadIdx.x == 0) barriers.init();
    __syncthreads();
    if (threadIdx.x >= F::CONSUMERS * WARPGROUP) {
        give_registers<F::PRODUCER_REGISTERS>();
        if (threadIdx.x == F::CONSUMERS * WARPGROUP) forward_producer<F>(qkv, barriers, shared, d, work, &counters[counter]);
    } else {
        take_registers<F::CONSUMER_REGISTERS>();
        forward_consumer<F>(out, barriers, shared, d, work, lse);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

template <int HS_, int QUERIES_>
struct Backward {
    static constexpr int HS = HS_, CONSUMERS = 2, KEYS = 128, QUERIES = QUERIES_, STAGES = 2, THREADS = 3 * WARPGROUP;
    // Of a tile (QUERIES, HS) of dq, a consumer warpgroup makes 64 rows, or where there are no more than 64, half of the columns.
    static constexpr int DQ_COLS = QUERIES == 64 ? HS / 2 : HS;
    static constexpr int KV_BYTES = KEYS * HS * 2, Q_BYTES = QUERIES * HS * 2, DS_BYTES = KEYS * QUERIES * 2, DQ_BYTES = QUERIES * HS * 4;
    static constexpr int STATS_BYTES = 2 * QUERIES * 4;  // of each query: log-sum-exp in powers of two, delta
    // shared memory, from a multiple of 1024 on
    static constexpr int K = 0, V = K + KV_BYTES, Q = V + KV_BYTES, DO = Q + STAGES * Q_BYTES, DS = DO + STAGES * Q_BYTES;
    static constexpr int DQ = DS + 2 * DS_BYTES, STATS = DQ + DQ_BYTES, BARRIERS = STATS + STAGES * STATS_BYTES;
    static constexpr int SHARED = BARRIERS + (3 + 4 * STAGES) * 8 + 1024;
};

using Backward64 = Backward<64, 128>;   // as many queries as registers allow: half the barriers of 64
using Backward128 = Backward<128, 64>;

template <class F>
struct BackwardBarriers {
    uint32_t base;
    __device__ Barrier kv_full() const { return {base}; }
    __device__ Barrier dq_full() const { return {base + 8}; }
    __device__ Barrier dq_empty() const { return {base + 16}; }
    __device__ Barrier q_full(int stage) const { return {base + 24 + stage * 32}; }
    __device__ Barrier q_empty(int stage) const { return {base + 32 + stage * 32}; }
    __device__ Barrier do_full(int stage) const { return {base + 40 + stage * 32}; }
    __device__ Barrier do_empty(int stage) const { return {base + 48 + stage * 32}; }

    __device__ void init() const {
        constexpr int WARPS = F::CONSUMERS * 4;
        kv_full().init(1), dq_full().init(WARPS), dq_empty().init(1);
        for (int i = 0; i < F::STAGES; i++) {
            q_full(i).init(1), q_empty(i).init(WARPS * WARP);
            do_full(i).init(1), do_empty(i).init(WARPS);
        }
        fence_barrier_init();
    }
};

// In the workspace, by tiles of QUERIES queries: (B, NH, tiles, ...).
struct Scratch {
    float* stats;  // (2, QUERIES): log-sum-exp / ln 2 (infinity beyond T, which makes p zero), delta
    float* dq;     // (QUERIES, HS), blocks of eight columns exclusive-ored with the row's last two bits: see store_dq
    int* added;    // how many blocks have added their part of dq
    int* next;     // one for all: the number of the next block to start
    int tiles;
};

// One block: its tile of keys, and the steps it walks: every query head of the group, and of each the tiles of queries that see the keys.
struct Block {
    int n, b, kv, first, tiles;  // tile of keys, sequence, key/value head; first tile of queries, and their number
    template <class F>
    __device__ static Block make(const Dims& d, int tiles, int number) {
        const int key_tiles = (d.T + F::KEYS - 1) / F::KEYS, head = number / key_tiles, n = key_tiles - 1 - number % key_tiles;
        return {n, head / d.NKV, head % d.NKV, n * F::KEYS / F::QUERIES, tiles};
    }
};
struct Walk {
    int m, h, end;  // tile of queries, query head, the head after the last
    __device__ Walk(const Dims& d, const Block& block) : m(block.first), h(block.kv * d.group()), end(h + d.group()) {}
    __device__ bool done() const { return h == end; }
    __device__ void next(const Block& block) {
        if (++m == block.tiles) m = block.first, h++;
    }
    __device__ int64_t tile(const Dims& d, const Block& block) const { return int64_t(block.b * d.NH + h) * block.tiles + m; }  // of Scratch
};

template <class F>
__device__ void backward_loader(const CUtensorMap& qkv, const CUtensorMap& dout, const BackwardBarriers<F>& at, uint32_t shared,
                                const Dims& d, const Block& block, const Scratch& scratch) {
    constexpr int HS = F::HS;
    at.kv_full().arrive_and_expect(2 * F::KV_BYTES);
    load_tile<HS, F::KEYS>(shared + F::K, qkv, at.kv_full(), (d.NH + block.kv) * HS, block.n * F::KEYS, block.b);
    load_tile<HS, F::KEYS>(shared + F::V, qkv, at.kv_full(), (d.NH + d.NKV + block.kv) * HS, block.n * F::KEYS, block.b);
    Ring<F::STAGES> ring;
    for (Walk walk(d, block); !walk.done(); walk.next(block), ring.next()) {
        const Barrier q_full = at.q_full(ring.stage), do_full = at.do_full(ring.stage);
        const uint32_t q = shared + F::Q + ring.stage * F::Q_BYTES, dout_tile = shared + F::DO + ring.stage * F::Q_BYTES;
        at.q_empty(ring.stage).wait(ring.parity ^ 1);
        q_full.arrive_and_expect(F::Q_BYTES + F::STATS_BYTES);
        load_tile<HS, F::QUERIES>(q, qkv, q_full, walk.h * HS, walk.m * F::QUERIES, block.b);
        bulk_load(shared + F::STATS + ring.stage * F::STATS_BYTES, scratch.stats + walk.tile(d, block) * 2 * F::QUERIES, F::STATS_BYTES, q_full);
        at.do_empty(ring.stage).wait(ring.parity ^ 1);
        do_full.arrive_and_expect(F::Q_BYTES);
        load_tile<HS, F::QUERIES>(dout_tile, dout, do_full, walk.h * HS, walk.m * F::QUERIES, block.b);
    }
}

// dq of a tile of queries is a sum over blocks of keys. It is added up in global memory, in FP32 and in a fixed order, so the bits are always
// the same: first the keys on the diagonal, then those before them, down to the first. Nobody waits long, because a block starts on its own
// diagonal, one step behind the block of the next keys. That block has a lower number and so has started already:
// see backward_kernel.
template <class F>
__device__ void dq_writer(const BackwardBarriers<F>& at, uint32_t shared, const Dims& d, const Block& block, const Scratch& scratch) {
    int step = 0;
    for (Walk walk(d, block); !walk.done(); walk.next(block), step++) {
        const int before = walk.m * F::QUERIES / F::KEYS - block.n;  // blocks that come before this one
        const int64_t tile = walk.tile(d, block);
        float* sum = scratch.dq + tile * F::QUERIES * F::HS;
        at.dq_full().wait(step & 1);
        if (before == 0) {
            bulk_store(sum, shared + F::DQ, F::DQ_BYTES);
        } else {
            for (int added = -1; added != before;)
                asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(added) : "l"(scratch.added + tile) : "memory");
            fence_async();
            bulk_add(sum, shared + F::DQ, F::DQ_BYTES);
        }
        bulk_commit();
        bulk_wait_read();
        at.dq_empty().arrive();
        bulk_wait();
        fence_async();
        asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(scratch.added + tile), "r"(before + 1) : "memory");
    }
}

__device__ float2 load_shared2(uint32_t address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

// This warpgroup's part of a tile (QUERIES, HS) of dq in FP32. Exclusive-or keeps the rows of a warp out of each other's banks.
template <int HS, int R>
__device__ void store_dq(uint32_t tile, const float (&dq)[R], int first_row, int first_col) {
    const int row = first_row + fragment_row();  // and row + 8, whose last two bits are the same
#pragma unroll
    for (int i = 0; i < R; i += 2) {
        const int block = (first_col / 8 + i / 4) ^ (row & 3);
        const uint32_t to = tile + ((row + i / 2 % 2 * 8) * HS + block * 8 + fragment_col()) * 4;
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(dq[i]), "f"(dq[i + 1]) : "memory");
    }
}

// Scores become p: `stats` holds the queries' log-sum-exp; `ahead` is this thread's first key less the tile's first query.
template <int R>
__device__ void make_p(float (&s)[R], uint32_t stats, float scale, int ahead) {
    const bool masked = ahead + 64 > 0;
#pragma unroll
    for (int i = 0; i < R; i += 4) {
        const int col = i * 2 + fragment_col();
        const float2 lse = load_shared2(stats + col * 4);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            s[i + j] = exp2_fast(s[i + j] * scale - (j % 2 ? lse.y : lse.x));
            if (masked && ahead + j / 2 * 8 > col + j % 2) s[i + j] = 0;
        }
    }
}

// dp becomes ds = p (dp - delta), with p as it was rounded for dv: keeping it in FP32 as well would take registers that do more good as a larger
// tile (head size 64: 268 against 327 TFLOP/s).
template <int R>
__device__ void make_ds(float (&dp)[R], const uint32_t (&p)[R / 8][4], uint32_t deltas) {
#pragma unroll
    for (int i = 0; i < R; i += 4) {
        const float2 delta = load_shared2(deltas + (i * 2 + fragment_col()) * 4);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const uint32_t pair = p[i / 8][i / 2 % 4 + j / 2];
            dp[i + j] = __uint_as_float(pair << 16) * (dp[i + j] - delta.x);
            dp[i + j + 1] = __uint_as_float(pair & 0xFFFF0000u) * (dp[i + j + 1] - delta.y);
        }
    }
}

template <class F>
__device__ void backward_consumer(const CUtensorMap& dqkv, const BackwardBarriers<F>& at, uint32_t shared, const Dims& d, const Block& block) {
    constexpr int HS = F::HS, ALL = F::CONSUMERS * WARPGROUP;
    const int warpgroup = threadIdx.x / WARPGROUP, first_key = block.n * F::KEYS + warpgroup * 64;
    const uint32_t k = shared + F::K, own_k = k + warpgroup * BOX_BYTES, own_v = shared + F::V + warpgroup * BOX_BYTES;
    const int dq_row = F::QUERIES == 64 ? 0 : warpgroup * 64, dq_col = F::QUERIES == 64 ? warpgroup * F::DQ_COLS : 0;  // of our part of dq
    const uint32_t dq_k = k + dq_col / PANEL * F::KEYS * 128 + dq_col % PANEL * 2;
    const float scale = d.scale * LOG2E;
    float dk[HS / 2], dv[HS / 2], s[F::QUERIES / 2], dp[F::QUERIES / 2], dq[F::DQ_COLS / 2];
    uint32_t p[F::QUERIES / 16][4];  // p, then ds, as operands
    Ring<F::STAGES> ring;
    Walk walk(d, block);

    auto start_scores = [&] {  // of the tile of queries at the ring's stage
        at.q_full(ring.stage).wait(ring.parity);
        wgmma_fence();
        scores<HS, F::KEYS>(s, own_k, shared + F::Q + ring.stage * F::Q_BYTES);
        wgmma_commit();
    };

    at.kv_full().wait(0);
    start_scores();
    wgmma_wait<0>(s);
    for (int step = 0; !walk.done(); step++) {
        const int stage = ring.stage, first_query = walk.m * F::QUERIES;
        const uint32_t q = shared + F::Q + stage * F::Q_BYTES, dout = shared + F::DO + stage * F::Q_BYTES;
        const uint32_t lse = shared + F::STATS + stage * F::STATS_BYTES, delta = lse + F::QUERIES * 4;
        const uint32_t ds = shared + F::DS + (step & 1) * F::DS_BYTES, own_ds = ds + warpgroup * BOX_BYTES;
        const uint32_t dq_ds = ds + dq_row / PANEL * F::KEYS * 128;

        at.do_full(stage).wait(ring.parity);
        wgmma_fence();
        scores<HS, F::KEYS>(dp, own_v, dout);
        wgmma_commit();
        make_p(s, lse, scale, first_key + fragment_row() - first_query);
        as_a(p, s);
        wgmma_wait<0>(dp);

        wgmma_fence();
        accumulate<F::QUERIES>(dv, p, dout, step > 0);
        wgmma_commit();
        make_ds(dp, p, delta);
        wgmma_wait<0>(dv, p);
        as_a(p, dp);  // from here on, ds
        store_tile<F::KEYS>(own_ds, p);
        fence_async_shared();

        wgmma_fence();
        accumulate<F::QUERIES>(dk, p, q, step > 0);
        wgmma_commit();
        sync_named(1, ALL);  // both halves of ds are there; they stay until the next but one step
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < F::KEYS; i += 16) wgmma<true, true>(dq, descriptor(dq_ds + i * 128), descriptor(dq_k + i * 128), i > 0);
        wgmma_commit();

        walk.next(block);
        if (!walk.done()) ring.next();
        start_scores();  // of the next tile; after the last one, for nothing: a branch here makes the compiler wait for every product
        wgmma_wait<1>(dq, dk, p);
        at.q_empty(stage).arrive();  // every thread, since each has read the statistics itself
        release(at.do_empty(stage));
        at.dq_empty().wait(~step & 1);
        store_dq<HS>(shared + F::DQ, dq, dq_row, dq_col);
        fence_async_shared();
        release(at.dq_full());
        wgmma_wait<0>(s);
    }

    // k and v are no longer needed: dk and dv take their place on the way out.
    sync_named(1, ALL);
    uint32_t result[HS / 16][4];
    as_a(result, dv);
    store_tile<F::KEYS>(own_v, result);
#pragma unroll
    for (float& x : dk) x *= d.scale;
    as_a(result, dk);
    store_tile<F::KEYS>(own_k, result);
    fence_async_shared();
    sync_named(2 + warpgroup, WARPGROUP);
    if (threadIdx.x % WARPGROUP != 0 || first_key >= d.T) return;
    for (int panel = 0; panel < HS / PANEL; panel++) {
        tma_store(dqkv, own_k + panel * F::KEYS * 128, (d.NH + block.kv) * HS + panel * PANEL, first_key, block.b);
        tma_store(dqkv, own_v + panel * F::KEYS * 128, (d.NH + d.NKV + block.kv) * HS + panel * PANEL, first_key, block.b);
    }
    bulk_commit();
    bulk_wait_read();
}

// A block owns a tile of keys, the last of a head first: see dq_writer. Blocks take their numbers from a counter as
// they start, since CUDA may start them in any order. A block waits only for lower numbers, which have started before
// it, so there is no deadlock.
template <class F>
__global__ void __launch_bounds__(F::THREADS, 1)
    backward_kernel(const __grid_constant__ CUtensorMap qkv, const __grid_constant__ CUtensorMap dout, const __grid_constant__ CUtensorMap dqkv,
                    Dims d, Scratch scratch) {
    if (!HOPPER) return __trap();
    extern __shared__ uint8_t raw[];
    const uint32_t shared = (shared_address(raw) + 1023) & ~1023u;
    const BackwardBarriers<F> barriers{shared + F::BARRIERS};
    __shared__ int number;
    if (threadIdx.x == 0) {
        number = atomicAdd(scratch.next, 1);
        barriers.init();
    }
    __syncthreads();
    const Block block = Block::make<F>(d, scratch.tiles, number);
    if (threadIdx.x >= F::CONSUMERS * WARPGROUP) {
        give_registers<24>();
        const int thread = threadIdx.x - F::CONSUMERS * WARPGROUP;
        if (thread == 0) backward_loader<F>(qkv, dout, barriers, shared, d, block, scratch);
        if (thread == WARP) dq_writer<F>(barriers, shared, d, block, scratch);
    } else {
        take_registers<240>();
        backward_consumer<F>(dqkv, barriers, shared, d, block);
    }
}

// Before and after: a block a tile (QUERIES, HS) of one head, grid (NH, tiles, B), sixteen bytes a load and all of a thread's loads in flight.
constexpr int TILE_THREADS = 256;

__device__ float dot8(const uint4& a, const uint4& b) {
    const uint32_t as[] = {a.x, a.y, a.z, a.w}, bs[] = {b.x, b.y, b.z, b.w};
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += __uint_as_float(as[i] << 16) * __uint_as_float(bs[i] << 16);
        sum += __uint_as_float(as[i] & 0xFFFF0000u) * __uint_as_float(bs[i] & 0xFFFF0000u);
    }
    return sum;
}

// Before: delta = rowsum(dout * out) and the log-sum-exp. HS / 8 neighbouring threads share a row.
template <class F>
__global__ void __launch_bounds__(TILE_THREADS)
    prepare_kernel(Dims d, Scratch scratch, const uint4* out, const uint4* dout, const float* lse) {
    constexpr int LANES = F::HS / 8, STEP = TILE_THREADS / LANES, ROWS = F::QUERIES / STEP;
    const int h = blockIdx.x, b = blockIdx.z, lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
    const int64_t head = int64_t(b) * d.NH + h, tile = head * scratch.tiles + blockIdx.y;
    uint4 o[ROWS], g[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int t = blockIdx.y * F::QUERIES + first + i * STEP;
        const int64_t at = ((int64_t(b) * d.T + t) * d.NH + h) * LANES + lane;
        o[i] = t < d.T ? out[at] : uint4{}, g[i] = t < d.T ? dout[at] : uint4{};
    }
    float* stats = scratch.stats + tile * 2 * F::QUERIES;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = first + i * STEP, t = blockIdx.y * F::QUERIES + row;
        float delta = dot8(o[i], g[i]);
        for (int j = LANES / 2; j > 0; j /= 2) delta += __shfl_xor_sync(~0u, delta, j);
        if (lane != 0) continue;
        stats[row] = t < d.T ? lse[head * d.T + t] * LOG2E : INFINITY;
        stats[F::QUERIES + row] = delta;
    }
    if (threadIdx.x == 0) scratch.added[tile] = 0, *scratch.next = 0;
}

// After: dq in BF16.
template <class F>
__global__ void __launch_bounds__(TILE_THREADS) finish_kernel(Dims d, Scratch scratch, bf16* dqkv) {
    constexpr int LANES = F::HS / 4, STEP = TILE_THREADS / LANES, ROWS = F::QUERIES / STEP;
    const int h = blockIdx.x, b = blockIdx.z, lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
    const float* from = scratch.dq + ((int64_t(b) * d.NH + h) * scratch.tiles + blockIdx.y) * F::QUERIES * F::HS;
    float4 x[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = first + i * STEP;
        x[i] = *reinterpret_cast<const float4*>(from + row * F::HS + ((lane / 2) ^ (row & 3)) * 8 + lane % 2 * 4);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int t = blockIdx.y * F::QUERIES + first + i * STEP;
        const uint2 bits = {pack(x[i].x * d.scale, x[i].y * d.scale), pack(x[i].z * d.scale, x[i].w * d.scale)};
        if (t < d.T) *reinterpret_cast<uint2*>(dqkv + ((int64_t(b) * d.T + t) * (d.NH + 2 * d.NKV) + h) * F::HS + lane * 4) = bits;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launches

// What TMA has to know of a (B, T, cols) tensor: boxes of 64 rows by 64 columns, swizzled; what lies beyond T reads as zero and is not written.
CUtensorMap tensor_map(const AttentionShape& s, const void* data, int64_t cols) {
    static const auto encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found), "attention");
        if (found != cudaDriverEntryPointSuccess) throw Error("The driver is too old for TMA; install one for CUDA 12 or newer.");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    CUtensorMap map;
    const cuuint64_t sizes[] = {cuuint64_t(cols), cuuint64_t(s.T), cuuint64_t(s.B)};
    const cuuint64_t strides[] = {cuuint64_t(cols) * 2, cuuint64_t(s.T * cols) * 2};  // bytes
    const cuuint32_t box[] = {PANEL, BOX, 1}, steps[] = {1, 1, 1};
    const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) throw Error("TMA refuses the attention tensors (driver error " + std::to_string(result) + "): their "
                                            "addresses must be multiples of 16.");
    return map;
}

template <class Kernel, class... Args>
void launch(Kernel kernel, dim3 grid, int threads, int shared, cudaStream_t stream, Args... args) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "attention");
    kernel<<<grid, threads, shared, stream>>>(args...);
    check(cudaGetLastError(), "attention");
}

int multiprocessors() {
    int device = 0, n = 0;
    check(cudaGetDevice(&device), "attention");
    check(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device), "attention");
    return n;
}

template <class F>
void forward(const AttentionShape& s, const void* qkv, void* out, float* lse, cudaStream_t stream) {
    const int64_t cached = 16 << 20, heads = s.B * s.NH, head_bytes = std::max<int64_t>(1, 2 * s.T * F::HS * 2 * s.NKV / s.NH);
    const Work todo{int(ceil_div(s.T, F::QUERIES)), int(heads), int(std::clamp<int64_t>(cached / head_bytes, 1, heads))};
    launch(forward_kernel<F>, std::min(todo.total(), multiprocessors()), F::THREADS, F::SHARED, stream,
           tensor_map(s, qkv, s.qkv_cols()), tensor_map(s, out, s.NH * F::HS), dims(s), todo, next_counter(), lse);
}

// The parts of the workspace, one after the other.
struct Layout {
    int64_t stats, dq, added, next, end;  // bytes
    Layout(const AttentionShape& s, int queries) {
        const int64_t tiles = s.B * s.NH * ceil_div(s.T, queries);
        stats = 0, dq = stats + tiles * 2 * queries * 4, added = dq + tiles * queries * s.HS * 4;
        next = added + tiles * 4, end = round_up(next + 4, 256);
    }
};

template <class F>
void backward(const AttentionShape& s, const void* qkv, const void* out, const float* lse, const void* dout, void* dqkv, void* workspace,
              cudaStream_t stream) {
    const Layout layout(s, F::QUERIES);
    uint8_t* bytes = static_cast<uint8_t*>(workspace);
    const Scratch scratch{reinterpret_cast<float*>(bytes + layout.stats), reinterpret_cast<float*>(bytes + layout.dq),
                          reinterpret_cast<int*>(bytes + layout.added),
                          reinterpret_cast<int*>(bytes + layout.next), int(ceil_div(s.T, F::QUERIES))};
    const dim3 tiles(static_cast<unsigned>(s.NH), static_cast<unsigned>(scratch.tiles), static_cast<unsigned>(s.B));
    const unsigned blocks = static_cast<unsigned>(s.B * s.NKV * ceil_div(s.T, F::KEYS));
    launch(prepare_kernel<F>, tiles, TILE_THREADS, 0, stream, dims(s), scratch, static_cast<const uint4*>(out),
           static_cast<const uint4*>(dout), lse);
    launch(backward_kernel<F>, blocks, F::THREADS, F::SHARED, stream, tensor_map(s, qkv, s.qkv_cols()),
           tensor_map(s, dout, s.NH * F::HS), tensor_map(s, dqkv, s.qkv_cols()), dims(s), scratch);
    launch(finish_kernel<F>, tiles, TILE_THREADS, 0, stream, dims(s), scratch, static_cast<bf16*>(dqkv));
}

}  // namespace

void attention_forward(const AttentionShape& s, const void* qkv, void* out, float* lse, cudaStream_t stream) {
    s.HS == 64 ? forward<Forward<64, 3>>(s, qkv, out, lse, stream) : forward<Forward<128, 2>>(s, qkv, out, lse, stream);
}

void attention_backward(const AttentionShape& s, const void* qkv, const void* out, const float* lse, const void* dout, void* dqkv,
                        void* workspace, cudaStream_t stream) {
    s.HS == 64 ? backward<Backward64>(s, qkv, out, lse, dout, dqkv, workspace, stream)
               : backward<Backward128>(s, qkv, out, lse, dout, dqkv, workspace, stream);
}

size_t attention_workspace(const AttentionShape& s) {
    return static_cast<size_t>(Layout(s, s.HS == 64 ? Backward64::QUERIES : Backward128::QUERIES).end);
}

}  // namespace coat::sm90
