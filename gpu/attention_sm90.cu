// gpu/attention_sm90.cu - causal attention for Hopper GPUs: the algorithm of attention.cu, on wgmma and TMA.
//
// attention.cu has the equations. The structure follows FlashAttention-3 (arXiv 2407.08608). What Hopper adds
// to earlier GPUs:
//   TMA: a copy engine. One thread names a box of a tensor by its coordinates. The hardware computes the
//     addresses, copies the box into shared memory, and writes zeros for rows beyond the tensor. It can also
//     store and add.
//   mbarrier: a barrier in shared memory that counts arrivals of threads and bytes copied by TMA. Its phase
//     flips between 0 and 1 when all have arrived. A thread waits for the end of the phase of a given parity.
//   wgmma: a GEMM instruction of a warpgroup (4 warps, 128 threads) for 64 rows. It reads operands from
//     shared memory and sums in registers. It is asynchronous: threads fence, issue, commit, compute other
//     things, and wait before they touch the registers again.
//   setmaxnreg: an instruction by which a warpgroup that needs few registers leaves them to the others.
//
// A block has one producer warpgroup and two or three consumer warpgroups. One thread of the producer asks
// TMA for tiles; the consumers do the GEMMs and the softmax. Each buffer in shared memory has two mbarriers
// between them: `full` (the tile has arrived) and `empty` (the consumers no longer need it).
//   Forward: a consumer warpgroup owns 64 queries. The GEMM p v of one tile of keys runs together with the
//     scores of the next tile. Warpgroups issue GEMMs in turns: one computes exponentials while the GEMMs of
//     another run.
//   Backward: a block owns 128 keys and loops over the tiles of queries that see them. It computes scores
//     transposed (keys x queries): p^T and ds^T are then in the registers that the GEMMs for dv and dk read,
//     and only the GEMM for dq needs ds in shared memory. Other producer threads add the block's part of dq
//     to an FP32 sum in global memory. A drawing of one step stands above `struct Backward`.
#include <cuda.h>

#include <algorithm>
#include <atomic>

#include "hopper.cuh"
#include "layers.cuh"
#include "libraries.h"

namespace coat::gpu {
namespace {

using namespace flash;

constexpr int PANEL = 64;  // columns of a panel, which take 128 bytes, as the swizzle of TMA and wgmma needs
constexpr int BOX = 64;    // rows of a panel that one TMA instruction copies
constexpr int BOX_BYTES = BOX * PANEL * 2;

// A position in a ring of STAGES buffers. Each time round, the phase of the buffers' barriers flips.
template <int STAGES> struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ void next() {
        stage++;
        if (stage < STAGES) return;
        stage = 0;
        parity ^= 1;
    }
};

// -----------------------------------------------------------------------------------------------------------
// Tiles and GEMMs
//
// A tile (rows, HS) is stored in shared memory as panels of 64 columns. A panel has rows of 128 bytes and is
// swizzled: the 16-byte chunks of row r are permuted by exclusive or with r % 8, so that a column touches all
// banks. Each warp of a warpgroup holds 16 of its 64 accumulator rows, in the layout described in
// attention_common.cuh.

// The first row that a thread holds of its warpgroup's 64 rows; the second is 8 rows below.
__device__ int fragment_row() { return threadIdx.x % WARPGROUP / WARP * 16 + threadIdx.x % WARP / 4; }

// Each of the next three functions starts a GEMM as one group of wgmmas; the caller waits with wgmma_wait().
// start_scores(): d (64, N) = a (64, HS) b (N, HS)^T. a is 64 rows of a tile of ROWS_A rows, b a tile of N
// rows.
template <int HS, int ROWS_A, int R> __device__ void start_scores(float (&d)[R], uint32_t a, uint32_t b) {
    constexpr int N = R * 2;
    const uint32_t from_a = descriptor(a), from_b = descriptor(b);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HS; k += 16) {
        const int panel = k / PANEL, inside = k % PANEL * 2;
        wgmma<false, false>(d, from_a + (panel * ROWS_A * 128 + inside) / 16,
                            from_b + (panel * N * 128 + inside) / 16, k > 0);
    }
    wgmma_commit();
}

// start_accumulate(): d (64, HS) = a (64, ROWS) b (ROWS, HS), plus d if `add`. a is in registers.
template <int ROWS, int R>
__device__ void start_accumulate(float (&d)[R], const uint32_t (&a)[ROWS / 16][4], uint32_t b, bool add) {
    const uint32_t from_b = descriptor(b, ROWS * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < ROWS; k += 16) wgmma<true>(d, a[k / 16], from_b + k * 128 / 16, add || k > 0);
    wgmma_commit();
}

// start_transposed(): d (64, N) = a (KEYS, 64)^T b (KEYS, N). Both are in shared memory.
template <int KEYS, int R> __device__ void start_transposed(float (&d)[R], uint32_t a, uint32_t b) {
    const uint32_t from_a = descriptor(a), from_b = descriptor(b);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS; i += 16)
        wgmma<true, true>(d, from_a + i * 128 / 16, from_b + i * 128 / 16, i > 0);
    wgmma_commit();
}

// Rounds accumulators to BF16. They already have the layout of operand a of the next GEMM.
template <int R> __device__ void to_operand(uint32_t (&a)[R / 8][4], const float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R / 2; i++) a[i / 4][i % 4] = pack_bf16(d[2 * i], d[2 * i + 1]);
}

// Writes this warpgroup's 64 rows of a tile (ROWS, HS) to shared memory, from address `tile` on.
template <int ROWS, int K> __device__ void store_tile(uint32_t tile, const uint32_t (&a)[K][4]) {
    const int lane = threadIdx.x % WARP, row = threadIdx.x % WARPGROUP / WARP * 16 + lane % 16;
    for (int k = 0; k < K; k++) {
        const int chunk = k % 4 * 2 + lane / 16;
        const uint32_t to = tile + k / 4 * ROWS * 128 + row * 128 + ((chunk ^ (row & 7)) * 16);
        stmatrix(to, a[k]);
    }
}

// Asks TMA for a tile (ROWS, HS) that starts at (row, col) of sequence b; rows beyond T become zeros.
template <int HS, int ROWS>
__device__ void load_tile(uint32_t to, const CUtensorMap& map, Barrier full, int col, int row, int b) {
    constexpr int BOXES = ROWS / BOX;  // boxes of a panel
    for (int i = 0; i < HS / PANEL * BOXES; i++)
        tma_load(to + i * BOX_BYTES, map, full, col + i / BOXES * PANEL, row + i % BOXES * BOX, b);
}

// Asks TMA to store 64 rows of a tile of ROWS rows; rows beyond T are not written.
template <int HS, int ROWS>
__device__ void store_rows(const CUtensorMap& map, uint32_t from, int col, int row, int b) {
    for (int panel = 0; panel < HS / PANEL; panel++)
        tma_store(map, from + panel * ROWS * 128, col + panel * PANEL, row, b);
}

// Describes a (B, T, cols) tensor to TMA, to be copied in boxes of 64 rows and 64 columns with the
// 128-byte swizzle.
CUtensorMap tensor_map(const AttentionShape& s, const void* data, int64_t cols) {
    static const auto encode =
        library_function<decltype(cuTensorMapEncodeTiled)>(DRIVER, "cuTensorMapEncodeTiled", CURE_OLD_DRIVER);
    CUtensorMap map;
    const cuuint64_t sizes[] = {cuuint64_t(cols), cuuint64_t(s.T), cuuint64_t(s.B)};
    const cuuint64_t strides[] = {cuuint64_t(cols) * 2, cuuint64_t(s.T * cols) * 2};  // bytes
    const cuuint32_t box[] = {PANEL, BOX, 1}, steps[] = {1, 1, 1};
    const CUresult result =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    require(result == CUDA_SUCCESS, "TMA wants tensors at multiples of 16 bytes");
    return map;
}

// Raises *amax_to_raise to the largest magnitude of the warp's values, rounded to BF16. `largest` is that of
// this thread's values. Rounding is monotone, so a thread needs to round only that, and not each value.
__device__ void update_bf16_amax(float* amax_to_raise, float largest) {
    raise_amax_by_warp(amax_to_raise, magnitude_bits(round_to_bf16(largest)));
}

// Says that the warp no longer needs the buffer that the barrier guards. All lanes call it.
__device__ void release(Barrier empty) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) empty.arrive();
}

// -----------------------------------------------------------------------------------------------------------
// Forward

// The sizes of a forward pass, and where things are in shared memory: the addresses of k and v, of the
// outputs on their way to TMA (O), of the items that the consumers read, and of the barriers.
template <int HS_> struct Forward {
    static constexpr int HS = HS_, CONSUMERS = HS == 64 ? 3 : 2, QUERIES = CONSUMERS * 64, KEYS = 128;
    static constexpr int STAGES = HS == 64 ? 3 : 2;  // as many as fit in shared memory
    static constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
    static constexpr int REGISTERS = HS == 64 ? 160 : 240, PRODUCER_REGISTERS = HS == 64 ? 32 : 24;
    static constexpr int Q_BYTES = QUERIES * HS * 2, KV_BYTES = KEYS * HS * 2;
    static constexpr int K = STAGES * Q_BYTES, V = K + STAGES * KV_BYTES, O = V + STAGES * KV_BYTES;
    static constexpr int ITEMS = O + Q_BYTES, BARRIERS = ITEMS + 16 * STAGES;
    static constexpr int SHARED = BARRIERS + 6 * STAGES * 8 + 1024;  // 1024: for alignment

    uint32_t base;
    __device__ uint32_t q(int stage) const { return base + stage * Q_BYTES; }
    __device__ uint32_t k(int stage) const { return base + K + stage * KV_BYTES; }
    __device__ uint32_t v(int stage) const { return base + V + stage * KV_BYTES; }
    __device__ uint32_t item(int stage) const { return base + ITEMS + 16 * stage; }  // the Item of q
    enum { Q_FULL, Q_EMPTY, K_FULL, K_EMPTY, V_FULL, V_EMPTY };                      // barriers of each stage
    __device__ Barrier barrier(int i, int stage) const { return {base + BARRIERS + 8 * (i + 6 * stage)}; }
    __device__ void init_barriers() const {
        // Even: `full`, one arrival, by the producer. Odd: `empty`, one arrival per consumer warp.
        for (int i = 0; i < 6 * STAGES; i++) barrier(i, 0).init(i % 2 ? CONSUMERS * 4 : 1);
        fence_barrier_init();
    }
};

// The work of a forward pass consists of items: an item is a tile of queries of one head. Blocks take the
// numbers of items from a counter, so that no multiprocessor is idle until the end. Tiles with the most keys
// come first. Heads are handled in sections whose keys and values fit in the L2 cache.
struct alignas(16) Item {
    int b, h;   // sequence and query head
    int first;  // the queries [first, end): a tile of them, or fewer
    int end;    // 0 says that no item is left
};
struct Work {
    int tiles;    // tiles of queries of a head
    int heads;    // heads of all sequences
    int section;  // heads of a section
    __host__ __device__ int total() const { return tiles * heads; }
    // Item `number`. If tiles do not divide the sequence, the first tile is short: it sees the fewest keys,
    // so that it wastes least.
    template <class F> __device__ Item find(const Dims& d, int number) const {
        if (number >= total()) return {};
        const int heads_before = number / (section * tiles) * section;
        const int heads_of_section = min(section, heads - heads_before);
        const int i = number - heads_before * tiles, head = heads_before + i % heads_of_section;
        const int end = (d.T + 63) / 64 * 64 - i / heads_of_section * F::QUERIES;
        return {head / d.NH, head % d.NH, max(end - F::QUERIES, 0), min(end, d.T)};
    }
};

// Where a pass counts its items. Launches use the counters in turn, so that launches on several streams,
// which may run at the same time, do not share one. The last block of a pass sets its counter back to 0.
struct Counter {
    int next;  // the number of the next item
    int left;  // how many blocks have left the pass
};
constexpr int COUNTERS = 256;
__device__ Counter counters[COUNTERS];
std::atomic<unsigned> launches{0};

// What one thread of the producer warpgroup does: it takes items, and asks TMA for their q, k and v.
template <class F>
__device__ void forward_producer(const CUtensorMap& qkv, const F& smem, const Dims& d, const Work& work,
                                 Counter* counter) {
    Ring<F::STAGES> q, kv;
    for (;; q.next()) {
        const Item item = work.find<F>(d, atomicAdd(&counter->next, 1));
        const Barrier q_full = smem.barrier(F::Q_FULL, q.stage);
        smem.barrier(F::Q_EMPTY, q.stage).wait(q.parity ^ 1);
        shared<Item>(smem.item(q.stage)) = item;
        if (item.end == 0) {
            q_full.arrive();  // the consumers leave
            break;
        }
        q_full.arrive_and_expect(F::Q_BYTES);
        load_tile<F::HS, F::QUERIES>(smem.q(q.stage), qkv, q_full, item.h * F::HS, item.first, item.b);
        for (int n = (item.end - 1) / F::KEYS; n >= 0; n--, kv.next()) {
            auto load_keys_or_values = [&](uint32_t to, int full, int empty, int column_head) {
                const Barrier arrived = smem.barrier(full, kv.stage);
                smem.barrier(empty, kv.stage).wait(kv.parity ^ 1);
                arrived.arrive_and_expect(F::KV_BYTES);
                load_tile<F::HS, F::KEYS>(to, qkv, arrived, column_head * F::HS, n * F::KEYS, item.b);
            };
            load_keys_or_values(smem.k(kv.stage), F::K_FULL, F::K_EMPTY, d.NH + item.h / d.heads_per_kv());
            load_keys_or_values(smem.v(kv.stage), F::V_FULL, F::V_EMPTY,
                                d.NH + d.NKV + item.h / d.heads_per_kv());
        }
    }
    __threadfence();
    if (atomicAdd(&counter->left, 1) < int(gridDim.x) - 1) return;
    counter->next = 0;
    counter->left = 0;
}

// What a consumer warpgroup does. It has 64 queries of each item, and goes through the tiles of keys from the
// one on the diagonal back to the first. The GEMM for the scores of a tile runs together with that for the
// output of the tile before, even from one item to the next.
template <class F> struct ForwardConsumer {
    static constexpr int HS = F::HS;
    const CUtensorMap& out;
    const F& smem;
    const Dims& d;
    float* const lse;
    float* const out_amax_to_raise;
    const int warpgroup = this_warpgroup();
    const bool leader = threadIdx.x % WARPGROUP == 0;
    // Named barriers: one for the turn of each warpgroup, then one for each warpgroup by itself.
    const int my_turn = 1 + warpgroup, next_turn = 1 + (warpgroup + 1) % F::CONSUMERS;
    const int own_barrier = 1 + F::CONSUMERS + warpgroup;
    const uint32_t output_buffer = smem.base + F::O + warpgroup * BOX_BYTES;

    float s[F::KEYS / 2];                                // scores, then p
    uint32_t p[F::KEYS / 16][4];                         // p as the operand of the GEMM for the output
    float o[HS / 2];                                     // the output, not divided by the sum yet
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // those of this thread's two rows: see softmax()
    float shrink[2], factor[2];  // what multiplies the output before the next tile's part is added
    float largest = 0;           // the largest magnitude of finished outputs, before they are rounded
    Ring<F::STAGES> q_ring, k_ring, v_ring;
    Item item{}, output_item{};   // the item of the scores, and that of the output
    int key_tile = 0;             // the tile of keys of the scores
    bool adds_to_output = false;  // whether start_output() adds to o, or overwrites it

    // Fetches the next item. Returns whether there is one.
    __device__ bool begin_item() {
        smem.barrier(F::Q_FULL, q_ring.stage).wait(q_ring.parity);
        item = shared<Item>(smem.item(q_ring.stage));
        key_tile = (item.end - 1) / F::KEYS;
        return item.end > 0;
    }
    __device__ void end_item() {
        release(smem.barrier(F::Q_EMPTY, q_ring.stage));
        q_ring.next();
    }
    __device__ void start_item_scores() {  // s = q k^T
        smem.barrier(F::K_FULL, k_ring.stage).wait(k_ring.parity);
        sync_named(my_turn, 2 * WARPGROUP);
        const uint32_t q = smem.q(q_ring.stage) + warpgroup * BOX_BYTES;
        start_scores<HS, F::QUERIES>(s, q, smem.k(k_ring.stage));
    }
    __device__ void finish_scores() {  // s becomes p in FP32
        const int first_row = item.first + warpgroup * 64;
        release(smem.barrier(F::K_EMPTY, k_ring.stage));
        k_ring.next();
        if ((key_tile + 1) * F::KEYS - 1 > first_row)
            mask(s, key_tile * F::KEYS - first_row - fragment_row());
        softmax(s, max, sum, shrink, d.scale * LOG2_E);
        pin(s);  // else the compiler waits for the output before it computes the exponentials
    }
    __device__ void start_output() {  // o += p v
        smem.barrier(F::V_FULL, v_ring.stage).wait(v_ring.parity);
        start_accumulate<F::KEYS>(o, p, smem.v(v_ring.stage), adds_to_output);
    }
    __device__ void finish_output() {
        wgmma_wait<0>(o, p);
        release(smem.barrier(F::V_EMPTY, v_ring.stage));
        v_ring.next();
    }
    __device__ void scale_output() {
        for (int i = 0; i < HS / 2; i++) o[i] *= factor[i / 2 % 2];
    }
    // Writes the lse of the rows of an item, and makes the factor that divides their output by the sum.
    __device__ void finish_statistics() {
        for (int r = 0; r < 2; r++) {
            const int row = item.first + warpgroup * 64 + fragment_row() + 8 * r;
            sum[r] = quad_sum(sum[r]);
            factor[r] = 1.0f / sum[r];
            if (threadIdx.x % 4 == 0 && row < item.end)
                lse[(int64_t(item.b) * d.NH + item.h) * d.T + row] = max[r] * d.scale + logf(sum[r]);
            max[r] = -INFINITY;
            sum[r] = 0;
        }
    }
    __device__ void write_output() {
        const int first_row = output_item.first + warpgroup * 64, row = first_row + fragment_row();
        if (out_amax_to_raise)
            for (int i = 0; i < HS / 2; i++)
                if (row + i / 2 % 2 * 8 < output_item.end) largest = larger_magnitude(largest, o[i]);
        uint32_t result[HS / 16][4];
        to_operand(result, o);
        if (leader) bulk_wait_read();  // the output of the item before has left shared memory
        sync_named(own_barrier, WARPGROUP);
        store_tile<F::QUERIES>(output_buffer, result);
        fence_async_shared();
        sync_named(own_barrier, WARPGROUP);
        if (!leader || first_row >= output_item.end) return;
        store_rows<HS, F::QUERIES>(out, output_buffer, output_item.h * HS, first_row, output_item.b);
        bulk_commit();
    }

    __device__ void run() {
        if (warpgroup == F::CONSUMERS - 1) arrive_named(next_turn, 2 * WARPGROUP);  // warpgroup 0 begins
        begin_item();
        start_item_scores();
        arrive_named(next_turn, 2 * WARPGROUP);
        wgmma_wait<0>(s);
        finish_scores();
        to_operand(p, s);
        for (;;) {
            const bool last = key_tile == 0;  // the scores are those of the last tile of their item
            output_item = item;
            if (last) {
                end_item();
                finish_statistics();
                if (!begin_item()) break;
            } else {
                key_tile--;
            }
            start_item_scores();
            start_output();
            arrive_named(next_turn, 2 * WARPGROUP);
            wgmma_wait<1>(s);
            finish_scores();
            finish_output();
            to_operand(p, s);
            if (!last) {
                factor[0] = shrink[0];
                factor[1] = shrink[1];
            }
            scale_output();
            if (last) write_output();
            adds_to_output = !last;
        }
        start_output();
        finish_output();
        scale_output();
        write_output();
        if (out_amax_to_raise) update_bf16_amax(out_amax_to_raise, largest);
        if (leader) bulk_wait_read();
    }
};

// The grid has as many blocks as the GPU has multiprocessors, or one for each item if these are fewer.
template <class F>
__global__ void __launch_bounds__(F::THREADS, 1)
    attention_forward_kernel(const __grid_constant__ CUtensorMap qkv, const __grid_constant__ CUtensorMap out,
                             Dims d, Work work, int counter, float* lse, float* out_amax_to_raise) {
    if (!HOPPER) return __trap();
    const F smem{dynamic_shared_memory(1024)};  // the period of the swizzle
    if (threadIdx.x == 0) smem.init_barriers();
    __syncthreads();
    if (threadIdx.x >= F::CONSUMERS * WARPGROUP) {
        decrease_registers<F::PRODUCER_REGISTERS>();
        if (threadIdx.x == F::CONSUMERS * WARPGROUP)
            forward_producer<F>(qkv, smem, d, work, &counters[counter]);
    } else {
        increase_registers<F::REGISTERS>();
        ForwardConsumer<F>{out, smem, d, lse, out_amax_to_raise}.run();
    }
}

template <class F>
void forward(const AttentionShape& s, const void* qkv, void* out, float* lse, float* out_amax_to_raise,
             cudaStream_t stream) {
    constexpr int64_t CACHED = 16 << 20;  // bytes of keys and values that stay in the L2 cache
    const int64_t heads = s.B * s.NH, head_bytes = std::max<int64_t>(1, 2 * s.T * F::HS * 2 * s.NKV / s.NH);
    const Work work{int(ceil_div(s.T, F::QUERIES)), int(heads),
                    int(std::clamp<int64_t>(CACHED / head_bytes, 1, heads))};
    launch("attention_forward", attention_forward_kernel<F>, std::min(work.total(), multiprocessors()),
           F::THREADS, F::SHARED, stream, tensor_map(s, qkv, s.qkv_cols()), tensor_map(s, out, s.NH * F::HS),
           s, work, int(launches++ % COUNTERS), lse, out_amax_to_raise);
}

// -----------------------------------------------------------------------------------------------------------
// Backward: attention_prepare_kernel, then attention_backward_kernel
//
// A block owns 128 keys. A consumer warpgroup owns 64 of them, and has its sums dk and dv in registers. The
// block walks over the tiles of queries that see its keys, in one or several query heads. One step is one
// tile:
//
//   a consumer waits for         and computes                    GEMMs that run in the background
//   --------------------------   -----------------------------   ---------------------------------
//   q                                                            s = k q^T           |
//   dout                                                         dp = v dout^T       | |
//   s                            p = exp(s - lse)                                      |
//   dp                           ds = p (dp - delta)
//                                ds to shared memory             dv += p dout        |
//   ds of both warpgroups                                        dq = ds^T k         | |
//   dv                           hands dout back                                       |
//                                                                dk += ds q            | |
//   dq, an empty buffer for it   dq to shared memory                                     |
//   dk                           hands q back
//
// Roles and mbarriers: `x -> y` says that x arrives at the barrier and y waits for it.
//
//   loader, a thread          q, dout and their statistics      Q_FULL, DOUT_FULL      loader -> consumers
//                             buffers to be filled again        Q_EMPTY, DOUT_EMPTY    consumers -> loader
//   writers, 1 or 2 threads   a tile of dq to be added          DQ_FULL (one each)     consumers -> writers
//                             the buffer for the next one       DQ_EMPTY               writers -> consumers
//
// Some sums are over several blocks. They are in FP32 in global memory. Their order is always the same, so
// that the bits do not depend on timing: each sum has a counter of the parts that have been added, and a
// block waits until all parts before its own have been.
//   dq       is added from the keys on the queries' diagonal to the first keys, or the other way: see Order
//            and dq_writer()
//   dk, dv   are added from the first head to the last, if a block has one of the heads that share its
//            keys: see sum_heads()
// Blocks at the end of the grid round finished sums dq to BF16: see finish_dq(). They run on multiprocessors
// that would be idle while the last blocks of keys are at work.

// What is done to dqkv in registers, before it is written: see AttentionBackward in gpu/attention.h.
struct Epilogue {
    const float2* rope_table;   // (T, HS / 2) {cos, sin}; null if there is no RoPE
    float* dqkv_amax_to_raise;  // may be null

    // {cos, sin} of row t of N neighbouring columns of the first half of a head, from the even column `col`
    // on. A row past T, which is not written, gets those of the last row.
    template <int HS, int N>
    __device__ void load_angles(const Dims& d, int t, int col, float2 (&angles)[N]) const {
        const float2* const first = rope_table + min(t, d.T - 1) * (HS / 2) + col;
        for (int i = 0; i < N; i += 2) {
            const float4 two = __ldg(reinterpret_cast<const float4*>(first + i));
            angles[i] = {two.x, two.y};
            angles[i + 1] = {two.z, two.w};
        }
    }
};
// Rotates a pair of elements of dq or dk back: see AttentionBackward::dqkv.
__device__ void rotate_back(float& x, float& y, float2 angle) {
    x = round_to_bf16(x);
    y = round_to_bf16(y);
    rotate(x, y, angle.x, -angle.y);
}

// A block's turn in a sum begins when as many parts have been added as come before its own.
__device__ void wait_for_turn(const int* counter, int turn) {
    int parts;
    do {
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(parts) : "l"(counter) : "memory");
    } while (parts != turn);
}
__device__ void end_turn(int* counter, int turn) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(counter), "r"(turn + 1) : "memory");
}

// The sizes of a backward pass, and where things are in shared memory.
template <int HS_> struct Backward {
    static constexpr int HS = HS_, CONSUMERS = 2, THREADS = 3 * WARPGROUP, KEYS = 128, STAGES = 2;
    // A tile has as many queries as registers allow, because then there are fewer barriers for each query.
    static constexpr int QUERIES = HS == 64 ? 128 : 64;
    // Whether a block of keys has one of the query heads that share them, or all. Short blocks end more
    // evenly, but then dk and dv must be summed. With 2 x 8192 tokens, 32 heads of 128 and 8 heads of keys
    // one head takes 5,490 microseconds and all heads take 6,195. With 16 x 2048 tokens, 32 heads of 64 and 4
    // heads of keys it is 1,963 and 1,852.
    static constexpr bool ONE_HEAD = HS == 128;
    // The number of threads that add dq in turns: one waits for its turn while the part of the other is being
    // added. Compared with one thread, two are 7% to 10% faster for heads of 128. For heads of 64 they are 3%
    // faster with 8,192 tokens, and 1% slower with 1,024.
    static constexpr int WRITERS = 2;
    // A consumer warpgroup computes 64 rows of a tile of dq, or half of its columns if QUERIES is 64.
    static constexpr int DQ_COLS = QUERIES == 64 ? HS / 2 : HS;

    static constexpr int KV_BYTES = KEYS * HS * 2, Q_BYTES = QUERIES * HS * 2, DS_BYTES = KEYS * QUERIES * 2;
    static constexpr int DQ_BYTES = QUERIES * HS * 4, STATS_BYTES = 2 * QUERIES * 4;
    static constexpr int V = KV_BYTES, Q = V + KV_BYTES, DO = Q + STAGES * Q_BYTES;
    static constexpr int DS = DO + STAGES * Q_BYTES, DQ = DS + 2 * DS_BYTES, STATS = DQ + DQ_BYTES;
    static constexpr int BARRIERS = STATS + STAGES * STATS_BYTES;
    static constexpr int SHARED = BARRIERS + (4 + 4 * STAGES) * 8 + 1024;  // 1024: for alignment

    uint32_t base;
    __device__ uint32_t k() const { return base; }
    __device__ uint32_t v() const { return base + V; }
    __device__ uint32_t q(int stage) const { return base + Q + stage * Q_BYTES; }
    __device__ uint32_t dout(int stage) const { return base + DO + stage * Q_BYTES; }
    __device__ uint32_t ds(int i) const { return base + DS + i * DS_BYTES; }
    __device__ uint32_t dq() const { return base + DQ; }
    __device__ uint32_t stats(int stage) const { return base + STATS + stage * STATS_BYTES; }
    // Barriers, of which each stage has the last four.
    enum { KV_FULL, DQ_EMPTY, DQ_FULL, DQ_FULL_2, Q_FULL, Q_EMPTY, DOUT_FULL, DOUT_EMPTY };
    __device__ Barrier barrier(int i, int stage = 0) const { return {base + BARRIERS + 8 * (i + 4 * stage)}; }
    __device__ Barrier dq_full(int step) const { return barrier(DQ_FULL + step % WRITERS); }
    __device__ void init_barriers() const {
        constexpr int WARPS = CONSUMERS * 4;
        barrier(KV_FULL).init(1);
        barrier(DQ_EMPTY).init(1);
        for (int writer = 0; writer < WRITERS; writer++) dq_full(writer).init(WARPS);
        for (int i = 0; i < STAGES; i++) {
            barrier(Q_FULL, i).init(1);
            barrier(Q_EMPTY, i).init(WARPS * WARP);
            barrier(DOUT_FULL, i).init(1);
            barrier(DOUT_EMPTY, i).init(WARPS);
        }
        fence_barrier_init();
    }
};

// The order in which blocks start, and by which they are numbered. The query heads that a block goes through
// are a head set: one query head, or all that share a key/value head (ONE_HEAD says which). Each head set of
// each sequence has a block for each tile of keys.
//   Most head sets follow each other. In each of them the last keys come first, and walks begin at the
//     diagonal: a walk is then later than that of the next keys, for whose part of dq its own must wait.
//   The last head sets start side by side. Their first keys come first, and walks end at the diagonal. So the
//     longest blocks come first, and all multiprocessors end at about the same time: that is 1% to 6% faster
//     at 8,192 tokens and more.
struct Order {
    // How many blocks the last head sets have together: about one for each multiprocessor. With 256 of them,
    // 16 x 2048 tokens (32 heads of 64, 4 heads of keys) take 4% longer, and other shapes the same time.
    static constexpr int64_t LAST_BLOCKS = 128;
    int head_sets;       // of all sequences
    int key_tiles;       // of a sequence
    int last_head_sets;  // how many of them start side by side
    // summed: whether dk and dv are summed over head sets. Head sets side by side then wait for each other at
    // the same keys. Where walks are short, that takes longer than it saves (1% at 4 x 2048).
    Order(int64_t head_sets_, int64_t key_tiles_, bool summed)
        : head_sets(int(head_sets_)), key_tiles(int(key_tiles_)) {
        const bool worthwhile = !summed || key_tiles > 16;
        last_head_sets = worthwhile ? int(std::min(head_sets_ / 2, ceil_div(LAST_BLOCKS, key_tiles_))) : 0;
    }
    __host__ __device__ int blocks() const { return head_sets * key_tiles; }
};

// The workspace of a backward pass. A tile has Backward::QUERIES queries of one head.
struct BackwardWorkspace {
    QueryStatistics statistics;
    float* dq;  // (tiles, queries, HS), not multiplied by the scale yet; store_dq() has permuted the columns
    float* head_sum;  // (slots, 2 warpgroups, ...): sums of dk and dv over query heads: see sum_heads()
    // The counters of what has been added. attention_prepare_kernel sets them and `next` to zero.
    int* dq_parts;    // (tiles)
    int* head_parts;  // (slots, 2 warpgroups): the same for head_sum, over all sums that have used the slot
    int* next;        // one value: the number of the next block to start
    int slots;
    int64_t counters;  // how many integers the three counters above are
    size_t bytes;      // the size of the workspace

    template <class F>
    BackwardWorkspace(const AttentionShape& s, void* workspace, F) : statistics(s, F::QUERIES, workspace) {
        const int64_t tiles = statistics.all_tiles(s), key_tiles = ceil_div(s.T, F::KEYS);
        // There are so many slots that a block hardly ever waits for one. There are at least as many as a
        // head set has blocks, or the last head sets have: so blocks that use a slot before another block
        // have lower numbers.
        const bool sums = F::ONE_HEAD && s.NH > s.NKV;
        slots = sums ? int(std::min(s.B * s.NKV * key_tiles, 2 * Order::LAST_BLOCKS + key_tiles)) : 0;
        dq = statistics.data + tiles * 2 * F::QUERIES;
        head_sum = dq + tiles * F::QUERIES * F::HS;
        dq_parts = reinterpret_cast<int*>(head_sum + int64_t(slots) * 2 * F::KEYS * F::HS);
        head_parts = dq_parts + tiles;
        next = head_parts + 2 * slots;
        counters = next + 1 - dq_parts;
        bytes = reinterpret_cast<uint8_t*>(next + 1) - static_cast<uint8_t*>(workspace);
    }
};

// What one block does: its tile of keys, and a walk over its query heads and, in each, the tiles of queries
// that see these keys. Each role of the block has its own copy. The block's number says which tile.
struct Walk {
    int key_tile, b, kv_head;    // the block's tile of keys, sequence and key/value head
    int query_tiles;             // of a head
    bool ends_at_diagonal;       // else the walk over a head begins there
    int first_tile, last_tile;   // the tiles of queries where the walk over a head begins and ends
    int step;                    // from one tile of queries to the next: 1 or -1
    int query_tile, query_head;  // where the walk is now
    int end_head;                // the query head after the last
    template <class F>
    __device__ Walk(const Dims& d, int block_number, const Order& order, int query_tiles_, F)
        : query_tiles(query_tiles_) {
        const int heads = F::ONE_HEAD ? 1 : d.heads_per_kv();
        const int sets_before = order.head_sets - order.last_head_sets;
        const int among_last = block_number - sets_before * order.key_tiles;
        ends_at_diagonal = among_last >= 0;
        int head_set = block_number / order.key_tiles;
        key_tile = order.key_tiles - 1 - block_number % order.key_tiles;
        if (ends_at_diagonal) {
            head_set = sets_before + among_last % order.last_head_sets;
            key_tile = among_last / order.last_head_sets;
        }
        const int first_head = head_set * heads;  // its number among the heads of all sequences
        b = first_head / d.NH;
        query_head = first_head % d.NH;
        kv_head = query_head / d.heads_per_kv();
        end_head = query_head + heads;
        const int diagonal = key_tile * F::KEYS / F::QUERIES;
        first_tile = ends_at_diagonal ? query_tiles - 1 : diagonal;
        last_tile = ends_at_diagonal ? diagonal : query_tiles - 1;
        step = ends_at_diagonal ? -1 : 1;
        query_tile = first_tile;
    }
    __device__ bool done() const { return query_head == end_head; }
    __device__ void next() {
        const bool head_ends = query_tile == last_tile;
        query_tile = head_ends ? first_tile : query_tile + step;
        query_head += head_ends;
    }
    // The number of the tile of queries in BackwardWorkspace.
    __device__ int64_t tile(const Dims& d) const {
        return int64_t(b * d.NH + query_head) * query_tiles + query_tile;
    }
    // How many blocks add their part of dq of this tile before this one does.
    template <class F> __device__ int turn(F) const {
        return ends_at_diagonal ? key_tile : query_tile * F::QUERIES / F::KEYS - key_tile;
    }
};

// What the first producer thread does: it loads k and v once, then q, dout and their statistics tile by tile.
template <class F>
__device__ void backward_loader(const CUtensorMap& qkv, const CUtensorMap& dout, const F& smem, const Dims& d,
                                Walk walk, const BackwardWorkspace& workspace) {
    constexpr int HS = F::HS;
    const int b = walk.b, first_key = walk.key_tile * F::KEYS;
    const Barrier kv_full = smem.barrier(F::KV_FULL);
    kv_full.arrive_and_expect(2 * F::KV_BYTES);
    load_tile<HS, F::KEYS>(smem.k(), qkv, kv_full, (d.NH + walk.kv_head) * HS, first_key, b);
    load_tile<HS, F::KEYS>(smem.v(), qkv, kv_full, (d.NH + d.NKV + walk.kv_head) * HS, first_key, b);
    Ring<F::STAGES> ring;
#pragma unroll 1  // if it were unrolled, registers would spill: a producer has few
    for (; !walk.done(); walk.next(), ring.next()) {
        const Barrier q_full = smem.barrier(F::Q_FULL, ring.stage);
        const Barrier dout_full = smem.barrier(F::DOUT_FULL, ring.stage);
        const float* stats = workspace.statistics.data + walk.tile(d) * 2 * F::QUERIES;
        const int first_query = walk.query_tile * F::QUERIES;
        smem.barrier(F::Q_EMPTY, ring.stage).wait(ring.parity ^ 1);
        q_full.arrive_and_expect(F::Q_BYTES + F::STATS_BYTES);
        load_tile<HS, F::QUERIES>(smem.q(ring.stage), qkv, q_full, walk.query_head * HS, first_query, b);
        bulk_load(smem.stats(ring.stage), stats, F::STATS_BYTES, q_full);
        smem.barrier(F::DOUT_EMPTY, ring.stage).wait(ring.parity ^ 1);
        dout_full.arrive_and_expect(F::Q_BYTES);
        load_tile<HS, F::QUERIES>(smem.dout(ring.stage), dout, dout_full, walk.query_head * HS, first_query,
                                  b);
    }
}

// What a thread of another producer warp does: it adds the block's parts of dq to the sums in global memory.
// dq of a tile of queries is a sum over all blocks with keys that these queries see. The block that comes
// before this one in the sum has a lower number, so it has started already: see attention_backward_kernel().
template <class F>
__device__ void dq_writer(const F& smem, const Dims& d, Walk walk, const BackwardWorkspace& workspace,
                          int writer) {
#pragma unroll 1
    for (int step = 0; !walk.done(); walk.next(), step++) {
        if (step % F::WRITERS != writer) continue;
        const int turn = walk.turn(smem);
        const int64_t tile = walk.tile(d);
        float* sum = workspace.dq + tile * F::QUERIES * F::HS;
        if (turn > 0) {
            wait_for_turn(workspace.dq_parts + tile, turn);
            fence_async();
        }
        smem.dq_full(step).wait(step / F::WRITERS & 1);
        if (turn == 0) bulk_store(sum, smem.dq(), F::DQ_BYTES);
        else bulk_add(sum, smem.dq(), F::DQ_BYTES);
        bulk_commit();
        bulk_wait_read();
        smem.barrier(F::DQ_EMPTY).arrive();
        bulk_wait();
        fence_async();
        end_turn(workspace.dq_parts + tile, turn);
    }
}

// Writes this warpgroup's part of a tile (QUERIES, HS) of dq to shared memory, in FP32. The blocks of eight
// columns of a row are permuted by exclusive or with the row's number, so that the rows of a warp use
// different banks.
template <int HS, int R>
__device__ void store_dq(uint32_t tile, const float (&dq)[R], int first_row, int first_col) {
    const int row = first_row + fragment_row();  // the other row is row + 8, whose last two bits are the same
    for (int i = 0; i < R; i += 2) {
        const int block = (first_col / 8 + i / 4) ^ (row & 3);
        const uint32_t to = tile + ((row + i / 2 % 2 * 8) * HS + block * 8 + fragment_col()) * 4;
        shared<float2>(to) = {dq[i], dq[i + 1]};
    }
}

// Scores (keys x queries) become p = exp(s - lse). `stats` is the address of the queries' lse / ln 2; `ahead`
// is this thread's first key minus the tile's first query. MASKED says that some of the keys come after some
// of the queries: their p is zero.
template <bool MASKED, int R> __device__ void make_p(float (&s)[R], uint32_t stats, float scale, int ahead) {
#pragma unroll
    for (int i = 0; i < R; i += 4) {
        const int col = i * 2 + fragment_col();
        const float2 lse = shared<float2>(stats + col * 4);
        for (int j = 0; j < 4; j++) {
            s[i + j] = fast_exp2(s[i + j] * scale - (j % 2 ? lse.y : lse.x));
            if (MASKED && ahead + j / 2 * 8 > col + j % 2) s[i + j] = 0;
        }
    }
}

// dp becomes ds = p (dp - delta), where p is the one that was rounded to BF16 for dv.
template <int R> __device__ void make_ds(float (&dp)[R], const uint32_t (&p)[R / 8][4], uint32_t deltas) {
    for (int i = 0; i < R; i += 4) {
        const float2 delta = shared<float2>(deltas + (i * 2 + fragment_col()) * 4);
        for (int j = 0; j < 4; j += 2) {
            const float2 pair = unpack_bf16(p[i / 8][i / 2 % 4 + j / 2]);
            dp[i + j] = pair.x * (dp[i + j] - delta.x);
            dp[i + j + 1] = pair.y * (dp[i + j + 1] - delta.y);
        }
    }
}

// Sums dk and dv of this warpgroup's keys over the query heads that share them, in the order of the heads.
// The block of each head but the last adds its part to a slot of BackwardWorkspace::head_sum, where each
// thread adds what it holds. The block of the last head adds what it finds there to its own part. A slot
// serves one sum after another. All threads of a warpgroup call it. Returns whether this is the last head,
// whose dk and dv are then complete.
template <class F, int R>
__device__ bool sum_heads(float (&dk)[R], float (&dv)[R], const Dims& d, const Walk& walk,
                          const BackwardWorkspace& workspace) {
    const int key_tiles = (d.T + F::KEYS - 1) / F::KEYS;
    const int head = walk.query_head % d.heads_per_kv(), last = d.heads_per_kv() - 1;
    const int sum_number = (walk.b * d.NKV + walk.kv_head) * key_tiles + key_tiles - 1 - walk.key_tile;
    const int turn = sum_number / workspace.slots * d.heads_per_kv() + head;
    const int part = sum_number % workspace.slots * 2 + this_warpgroup(), barrier = 2 + this_warpgroup();
    const int thread = threadIdx.x % WARPGROUP;
    int* const counter = workspace.head_parts + part;
    float4* const in_slot =
        reinterpret_cast<float4*>(workspace.head_sum) + int64_t(part) * (R / 2) * WARPGROUP + thread;
    // Calls action(to, x) for each four values: `to` is their place in the slot, x the first of them in dk or
    // dv.
    auto for_each_four = [&](auto action) {
#pragma unroll
        for (int i = 0; i < R / 4; i++) {
            action(in_slot + 2 * i * WARPGROUP, dk + 4 * i);
            action(in_slot + (2 * i + 1) * WARPGROUP, dv + 4 * i);
        }
    };
    if (thread == 0) wait_for_turn(counter, turn);
    sync_named(barrier, WARPGROUP);
    if (head == 0) {
        for_each_four([](float4* to, const float* x) { __stcg(to, float4{x[0], x[1], x[2], x[3]}); });
    } else if (head < last) {
        for_each_four([](float4* to, const float* x) {
            asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]),
                         "f"(x[1]), "f"(x[2]), "f"(x[3])
                         : "memory");
        });
    } else {
        for_each_four([](float4* from, float* x) {
            const float4 before = __ldcg(from);
            x[0] = before.x + x[0];
            x[1] = before.y + x[1];
            x[2] = before.z + x[2];
            x[3] = before.w + x[3];
        });
    }
    sync_named(barrier, WARPGROUP);
    if (thread == 0) {
        __threadfence();
        end_turn(counter, turn);
    }
    return head == last;
}

// What a consumer warpgroup does. It has 64 of the block's 128 keys. s, p, dp and ds are transposed: (keys,
// queries).
template <class F> struct BackwardConsumer {
    static constexpr int HS = F::HS, BOTH = F::CONSUMERS * WARPGROUP;
    const CUtensorMap& dqkv;
    const F& smem;
    const Dims& d;
    const BackwardWorkspace& workspace;
    const Epilogue& epilogue;
    Walk walk;
    const int warpgroup = this_warpgroup(), first_key = walk.key_tile * F::KEYS + warpgroup * 64;
    const uint32_t own_k = smem.k() + warpgroup * BOX_BYTES, own_v = smem.v() + warpgroup * BOX_BYTES;
    const int dq_row = F::QUERIES == 64 ? 0 : warpgroup * 64;  // where this warpgroup's part of dq starts
    const int dq_col = F::QUERIES == 64 ? warpgroup * F::DQ_COLS : 0;
    const uint32_t dq_k = smem.k() + dq_col / PANEL * F::KEYS * 128 + dq_col % PANEL * 2;

    float dk[HS / 2], dv[HS / 2];                 // sums over the walk
    float s[F::QUERIES / 2], dp[F::QUERIES / 2];  // s becomes p, dp becomes ds
    float dq[F::DQ_COLS / 2];         // the part of dq from one tile of queries and this block's keys
    uint32_t p[F::QUERIES / 16][4];   // the operand of the GEMM for dv
    uint32_t ds[F::QUERIES / 16][4];  // the operand of the GEMM for dk
    Ring<F::STAGES> ring;

    __device__ void start_s() {  // s = k q^T, of the tile of queries at the ring's stage
        smem.barrier(F::Q_FULL, ring.stage).wait(ring.parity);
        start_scores<HS, F::KEYS>(s, own_k, smem.q(ring.stage));
    }
    __device__ void start_dp() {  // dp = v dout^T
        smem.barrier(F::DOUT_FULL, ring.stage).wait(ring.parity);
        start_scores<HS, F::KEYS>(dp, own_v, smem.dout(ring.stage));
    }
    __device__ void start_dq(uint32_t ds_tile) {  // dq = ds^T k, of this block's keys alone
        start_transposed<F::KEYS>(dq, ds_tile + dq_row / PANEL * F::KEYS * 128, dq_k);
    }
    // Rounds x and stores it in shared memory, in the place of this warpgroup's part of k or v.
    __device__ void stage_result(uint32_t tile, const float (&x)[HS / 2]) {
        uint32_t result[HS / 16][4];
        to_operand(result, x);
        store_tile<F::KEYS>(tile, result);
    }

    // Both elements of a pair of dk, HS / 2 columns apart, are in the same thread.
    __device__ void rotate_dk_back() {
        for (int i = 0; i < HS / 4; i += 2) {
            const int row = first_key + fragment_row() + i / 2 % 2 * 8, col = i / 4 * 8 + fragment_col();
            float2 angles[2];
            epilogue.load_angles<HS>(d, row, col, angles);
            for (int j = 0; j < 2; j++) rotate_back(dk[i + j], dk[i + j + HS / 4], angles[j]);
        }
    }
    __device__ float largest_magnitude_of_dk_and_dv() const {
        float largest = 0;
        for (int i = 0; i < HS / 2; i++)
            if (first_key + fragment_row() + i / 2 % 2 * 8 < d.T)
                largest = larger_magnitude(larger_magnitude(largest, dk[i]), dv[i]);
        return largest;
    }

    // Whether the tile of queries where the walk is now begins before this warpgroup's last key.
    __device__ bool tile_is_masked() const { return walk.query_tile * F::QUERIES < first_key + 63; }

    // The walk's step with this number, as drawn above.
    template <bool MASKED> __device__ void step(int number) {
        const int stage = ring.stage;
        const uint32_t lse = smem.stats(stage), delta = lse + F::QUERIES * 4, ds_tile = smem.ds(number & 1);
        const int ahead = first_key + fragment_row() - walk.query_tile * F::QUERIES;
        start_s();
        start_dp();
        wgmma_wait<1>(s);
        make_p<MASKED>(s, lse, d.scale * LOG2_E, ahead);
        to_operand(p, s);
        wgmma_wait<0>(dp);
        make_ds(dp, p, delta);
        to_operand(ds, dp);
        store_tile<F::KEYS>(ds_tile + warpgroup * BOX_BYTES, ds);

        start_accumulate<F::QUERIES>(dv, p, smem.dout(stage), number > 0);  // dv += p dout
        fence_async_shared();
        sync_named(1, BOTH);  // both warpgroups have stored ds; its buffer is used again two steps later
        start_dq(ds_tile);
        wgmma_wait<1>(dv, p);
        release(smem.barrier(F::DOUT_EMPTY, stage));
        start_accumulate<F::QUERIES>(dk, ds, smem.q(stage), number > 0);  // dk += ds q

        wgmma_wait<1>(dq);
        smem.barrier(F::DQ_EMPTY).wait(~number & 1);
        store_dq<HS>(smem.dq(), dq, dq_row, dq_col);
        fence_async_shared();
        release(smem.dq_full(number));
        wgmma_wait<0>(dk, ds);
        smem.barrier(F::Q_EMPTY, stage)
            .arrive();  // every thread arrives, because each has read the statistics
        walk.next();
        ring.next();
    }

    __device__ void run() {
        const Walk start = walk;
        smem.barrier(F::KV_FULL).wait(0);
        // Tiles that need no mask have their own copy of the step, which is 2% to 4% faster.
        for (int number = 0; !walk.done(); number++) {
            if (tile_is_masked()) step<true>(number);
            else step<false>(number);
        }

        if constexpr (F::ONE_HEAD)
            if (d.heads_per_kv() > 1 && !sum_heads<F>(dk, dv, d, start, workspace)) return;
        // k and v are no longer needed: dk and dv take their place in shared memory. TMA stores them from
        // there.
        sync_named(1, BOTH);
        stage_result(own_v, dv);
        for (float& x : dk) x *= d.scale;
        if (epilogue.rope_table) rotate_dk_back();
        stage_result(own_k, dk);
        fence_async_shared();
        sync_named(2 + warpgroup, WARPGROUP);
        const bool stores = threadIdx.x % WARPGROUP == 0 && first_key < d.T;
        if (stores) {
            store_rows<HS, F::KEYS>(dqkv, own_k, (d.NH + start.kv_head) * HS, first_key, start.b);
            store_rows<HS, F::KEYS>(dqkv, own_v, (d.NH + d.NKV + start.kv_head) * HS, first_key, start.b);
            bulk_commit();
        }
        if (epilogue.dqkv_amax_to_raise)
            update_bf16_amax(epilogue.dqkv_amax_to_raise, largest_magnitude_of_dk_and_dv());
        if (stores) bulk_wait_read();
    }
};

// What a block at the end of the grid does: it multiplies the sums dq of FINISH_TILES tiles by the scale,
// undoes RoPE, and writes them in BF16, once all blocks have added their parts. `number` counts such blocks;
// all_tiles is the number of tiles of queries of all heads. A thread has four columns of the first half of a
// head, and their partners in RoPE, which are the same columns of the second half.
constexpr int FINISH_TILES = 8;
template <class F>
__device__ void finish_dq(const Dims& d, const BackwardWorkspace& workspace, const Epilogue& epilogue,
                          bf16* dqkv, int number, int all_tiles) {
    constexpr int HALF = F::HS / 2, LANES = HALF / 4, STEP = F::THREADS / LANES;
    constexpr int ROWS = (F::QUERIES + STEP - 1) / STEP;
    const int tiles = workspace.statistics.tiles, lane = threadIdx.x % LANES, first_row = threadIdx.x / LANES;
    const int first = number * FINISH_TILES, end = min(first + FINISH_TILES, all_tiles);
    // Each of the first threads waits for one of the tiles.
    const int my_tile = first + int(threadIdx.x);
    if (my_tile < end)
        wait_for_turn(workspace.dq_parts + my_tile, my_tile % tiles * F::QUERIES / F::KEYS + 1);
    __syncthreads();
    float largest = 0;
#pragma unroll 1
    for (int tile = first; tile < end; tile++) {
        const int head = tile / tiles, m = tile % tiles, b = head / d.NH, h = head % d.NH;
        const float* from = workspace.dq + int64_t(tile) * F::QUERIES * F::HS;
        float4 sums[ROWS][2];
        float2 angles[ROWS][4];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = first_row + i * STEP, col = ((lane / 2) ^ (row & 3)) * 8 + lane % 2 * 4;
            if (row >= F::QUERIES) continue;
            const float* const four = from + row * F::HS + col;
            sums[i][0] = __ldcg(reinterpret_cast<const float4*>(four));
            sums[i][1] = __ldcg(reinterpret_cast<const float4*>(four + HALF));
            if (epilogue.rope_table)
                epilogue.load_angles<F::HS>(d, m * F::QUERIES + row, lane * 4, angles[i]);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = first_row + i * STEP, t = m * F::QUERIES + row;
            if (row >= F::QUERIES || t >= d.T) continue;
            const float4 first_half = sums[i][0], second_half = sums[i][1];
            float x[] = {first_half.x, first_half.y, first_half.z, first_half.w};
            float y[] = {second_half.x, second_half.y, second_half.z, second_half.w};
            for (int j = 0; j < 4; j++) {
                x[j] *= d.scale;
                y[j] *= d.scale;
                if (epilogue.rope_table) rotate_back(x[j], y[j], angles[i][j]);
            }
            if (epilogue.dqkv_amax_to_raise) largest = larger_magnitude(larger_magnitude(largest, x), y);
            bf16* const to = dqkv + ((int64_t(b) * d.T + t) * (d.NH + 2 * d.NKV) + h) * F::HS + lane * 4;
            store_in_one_instruction(to, uint2{pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])});
            store_in_one_instruction(to + HALF, uint2{pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])});
        }
    }
    if (epilogue.dqkv_amax_to_raise) update_bf16_amax(epilogue.dqkv_amax_to_raise, largest);
}

// The grid has a block for each tile of keys of each head set (see Order), and then the blocks that finish
// dq. CUDA may start blocks in any order, so they take their numbers from a counter as they start. A block
// waits only for blocks with lower numbers. These have started before it, so there is no deadlock.
template <class F>
__global__ void __launch_bounds__(F::THREADS, 1)
    attention_backward_kernel(const __grid_constant__ CUtensorMap qkv,
                              const __grid_constant__ CUtensorMap dout,
                              const __grid_constant__ CUtensorMap dqkv, Dims d, BackwardWorkspace workspace,
                              Epilogue epilogue, Order order, int dq_tiles, bf16* dqkv_data) {
    if (!HOPPER) return __trap();
    const F smem{dynamic_shared_memory(1024)};  // the period of the swizzle
    __shared__ int block_number;
    if (threadIdx.x == 0) {
        block_number = atomicAdd(workspace.next, 1);
        smem.init_barriers();
    }
    __syncthreads();
    if (block_number >= order.blocks())
        return finish_dq<F>(d, workspace, epilogue, dqkv_data, block_number - order.blocks(), dq_tiles);
    const Walk walk(d, block_number, order, workspace.statistics.tiles, F{});
    if (threadIdx.x >= F::CONSUMERS * WARPGROUP) {
        decrease_registers<24>();
        const int thread = threadIdx.x - F::CONSUMERS * WARPGROUP, writer = thread / WARP - 1;
        if (thread == 0) backward_loader<F>(qkv, dout, smem, d, walk, workspace);
        if (thread % WARP == 0 && writer >= 0 && writer < F::WRITERS)
            dq_writer<F>(smem, d, walk, workspace, writer);
    } else {
        increase_registers<240>();
        BackwardConsumer<F>{dqkv, smem, d, workspace, epilogue, walk}.run();
    }
}

template <class F>
void backward(const AttentionShape& s, const AttentionBackward& tensors, cudaStream_t stream) {
    const BackwardWorkspace workspace(s, tensors.workspace, F{});
    const Epilogue epilogue{tensors.rope_table, tensors.dqkv_amax_to_raise};
    const QueryStatistics& statistics = workspace.statistics;
    launch("attention_backward", attention_prepare_kernel<bf16, F::HS, F::QUERIES>, statistics.grid(s),
           PREPARE_THREADS, 0, stream, s, statistics, tensors.out, tensors.dout, tensors.lse,
           workspace.dq_parts, workspace.counters);
    const Order order(s.B * (F::ONE_HEAD ? s.NH : s.NKV), ceil_div(s.T, F::KEYS),
                      F::ONE_HEAD && s.NH > s.NKV);
    const int64_t dq_tiles = statistics.all_tiles(s);
    launch("attention_backward", attention_backward_kernel<F>,
           unsigned(order.blocks() + ceil_div(dq_tiles, FINISH_TILES)), F::THREADS, F::SHARED, stream,
           tensor_map(s, tensors.qkv, s.qkv_cols()), tensor_map(s, tensors.dout, s.NH * F::HS),
           tensor_map(s, tensors.dqkv, s.qkv_cols()), s, workspace, epilogue, order, int(dq_tiles),
           static_cast<bf16*>(tensors.dqkv));
}

template <class F> int64_t workspace_bytes(const AttentionShape& s) {
    return BackwardWorkspace(s, nullptr, F{}).bytes;
}

template <int HS>
constexpr AttentionKernels KERNELS{.forward = forward<Forward<HS>>,
                                   .backward = backward<Backward<HS>>,
                                   .workspace_bytes = workspace_bytes<Backward<HS>>};

}  // namespace

AttentionKernels hopper_attention(const AttentionShape& s) { return s.HS == 64 ? KERNELS<64> : KERNELS<128>; }

}  // namespace coat::gpu
