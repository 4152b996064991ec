// gpu/parameter_kernels.cu - what a step does with parameters besides AdamW (gpu/parameter_kernels.h).
#include "parameter_kernels.h"
#include "../common/random.h"
#include "../common/ranks.h"
#include "layers.cuh"

namespace coat::gpu {

constexpr int THREADS = 256;  // threads of a block

// ===========================================================================================================
// 1. The norm of all gradients, clipping, and steps that are skipped

static __global__ void __launch_bounds__(THREADS)
    write_loss_or_nan_kernel(const TensorScale* amaxes, int64_t n, const double* loss, double* loss_or_nan) {
    bool finite = true;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) finite = finite && isfinite(amaxes[i].amax);
    finite = __syncthreads_and(finite);
    if (threadIdx.x == 0) *loss_or_nan = finite && !isnan(*loss_or_nan) ? *loss : NAN;
}

void write_loss_or_nan(const TensorScale* amaxes, int64_t n, const double* loss, double* loss_or_nan,
                       cudaStream_t stream) {
    launch("write_loss_or_nan", write_loss_or_nan_kernel, 1, THREADS, /*shared_bytes=*/0, stream, amaxes, n,
           loss, loss_or_nan);
}

// The sum of squares of a chunk. It is computed in FP32 if it lies between 2^-80 and 2^80, else in double,
// because squares in FP32 could overflow or vanish.
static __device__ double sum_of_squares(const ChunkValues& v) {
    float sum = 0;
    for (int j = 0; j < CHUNK_SIZE; j++) sum += v[j] * v[j];
    if (sum > 0x1p-80f && sum < 0x1p+80f) return sum;
    double exact = 0;
    for (int j = 0; j < CHUNK_SIZE; j++) exact += static_cast<double>(v[j]) * v[j];
    return exact;
}

// A warp computes the sum of squares of one shard unit, the elements [begin, end) of a shard: SHARD_UNIT of
// them, or fewer at the end of the shard. The shard begins at gradients[offset].
constexpr int NORM_UNROLL = 4;  // loads in flight
static __device__ double squares_of_unit(const Bf16OrFp32& gradients, int64_t offset, int64_t begin,
                                         int64_t end) {
    constexpr int WARP_ELEMENTS = 32 * CHUNK_SIZE;
    double sum = 0;
    for (int64_t i = begin + threadIdx.x % 32 * CHUNK_SIZE; i < end; i += WARP_ELEMENTS * NORM_UNROLL) {
        Bf16OrFp32::LoadedChunk loaded[NORM_UNROLL] = {};
        for (int u = 0; u < NORM_UNROLL; u++)
            if (i + u * WARP_ELEMENTS < end) loaded[u] = gradients.load(offset + i + u * WARP_ELEMENTS);
        for (int u = 0; u < NORM_UNROLL; u++) {
            ChunkValues v;
            gradients.unpack(loaded[u], v);
            sum += sum_of_squares(v);
        }
    }
    return sum_of_warp(sum);
}

// Writes the sums of squares of all shard units of the shards. The units are dealt to the warps of the grid
// in turn, from the first unit of the first shard to the last unit of the last shard. `first` is the element
// of the rank's order with which the gradients begin.
constexpr int SQUARES_BLOCKS_PER_SM = 8;
static __global__ void __launch_bounds__(THREADS)
    compute_gradient_squares_kernel(const Shard* shards, int shard_count, Bf16OrFp32 gradients, int64_t first,
                                    int64_t first_shard_unit, const double* loss_or_nan,
                                    double* loss_and_squares) {
    const int lane = threadIdx.x % 32;
    const int64_t warp = thread_of_grid() / 32, warps = static_cast<int64_t>(gridDim.x) * THREADS / 32;
    if (warp == 0 && lane == 0) loss_and_squares[0] = *loss_or_nan;
    int64_t units_of_earlier_shards = 0;
    for (int i = 0; i < shard_count; i++) {
        const int64_t offset = shards[i].rank_offset - first, size = shards[i].size;
        const int64_t units = ceil_div(size, SHARD_UNIT);
        double* const sums_of_shard =
            loss_and_squares + 1 + shards[i].shard_units_before_shard - first_shard_unit;
        // Unit u of this shard is for the warp with the number (units_of_earlier_shards + u) % warps.
        const int64_t first_unit = (warp + warps - units_of_earlier_shards % warps) % warps;
        units_of_earlier_shards += units;
        for (int64_t unit = first_unit; unit < units; unit += warps) {
            const int64_t begin = unit * SHARD_UNIT, end = min(size, begin + SHARD_UNIT);
            const double sum = squares_of_unit(gradients, offset, begin, end);
            if (lane == 0) sums_of_shard[unit] = sum;
        }
    }
}

void compute_gradient_squares(const ShardsToUpdate& shards, const Range& shard_units,
                              const double* loss_or_nan, double* loss_and_squares, cudaStream_t stream) {
    // Shard units that other ranks sum stay 0 here.
    clear_async(loss_and_squares, (1 + shard_units.count) * static_cast<int64_t>(sizeof(double)), stream);
    const unsigned at_once = static_cast<unsigned>(SQUARES_BLOCKS_PER_SM * multiprocessors());
    const unsigned useful = block_count(32 * shard_units.count + 32, THREADS);
    launch("compute_gradient_squares", compute_gradient_squares_kernel, std::min(useful, at_once), THREADS,
           /*shared_bytes=*/0, stream, shards.shards, shards.count,
           bf16_or_fp32(shards.gradients, shards.gradient_format), shards.elements.first, shard_units.first,
           loss_or_nan, loss_and_squares);
}

// Adds the squares of the shard units to the state (adamw.h, GradientState). There is one block.
constexpr int STATE_THREADS = 1024;
static __global__ void __launch_bounds__(STATE_THREADS)
    update_gradient_state_kernel(const double* loss_and_squares, int64_t shard_units, int64_t ranks,
                                 float clip_limit, GradientState* state) {
    double mine = 0;
    for (int64_t unit = threadIdx.x; unit < shard_units; unit += STATE_THREADS) {
        // The sum of a unit is the largest that a rank has. NaN counts as larger than any number
        double sum = 0;
        for (int64_t r = 0; r < ranks; r++) {
            const double theirs = loss_and_squares[r * (1 + shard_units) + 1 + unit];
            if (theirs > sum || isnan(theirs)) sum = theirs;
        }
        mine += sum;
    }
    const double squares = sum_of_block<STATE_THREADS>(mine);
    if (threadIdx.x != 0) return;
    state->sum_of_squares += squares;
    state->norm = sqrt(state->sum_of_squares);
    state->clip_factor =
        static_cast<float>(clip_limit > 0 && state->norm > clip_limit ? clip_limit / state->norm : 1.0);
    // Below 2^62, squares are below 2^124, which every format of a second moment represents. NaN fails too.
    bool usable = sqrt(squares) * state->clip_factor < 0x1p62;
    for (int64_t r = 0; r < ranks; r++)  // the losses
        usable = usable && isfinite(loss_and_squares[r * (1 + shard_units)]);
    state->skip |= !usable;
}

void update_gradient_state(const double* loss_and_squares, int64_t shard_units, int64_t ranks,
                           float clip_limit, GradientState* state, cudaStream_t stream) {
    launch("update_gradient_state", update_gradient_state_kernel, 1, STATE_THREADS, /*shared_bytes=*/0,
           stream, loss_and_squares, shard_units, ranks, clip_limit, state);
}

// ===========================================================================================================
// 2. First values (this can wait)

// Writes the first values of the elements of a parameter that this rank owns. Thread i writes number i of
// them, which is element rank_offset + i of the rank's order. The weight is the master, rounded to nearest.
// Ties go away from zero, so that the remainder fits into 16 bits.
static __global__ void initialize_kernel(Weights w, int64_t rank_offset, Range owned, int64_t padded,
                                         float init_std, bool ones, int64_t used, uint64_t seed,
                                         uint64_t param_index) {
    const int64_t i = thread_of_grid(), to = rank_offset + i;
    if (i >= padded) return;
    const float value =
        i < owned.count ? initial_value(init_std, ones, used, seed, param_index, owned.first + i) : 0.0f;
    const uint32_t bits = __float_as_uint(value);
    if (w.format == Format::FP32) static_cast<float*>(w.values)[to] = value;
    else static_cast<uint16_t*>(w.values)[to] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    if (w.remainders) w.remainders[to] = static_cast<int16_t>(bits & 0xFFFFu);
}

void initialize(const Weights& w, int64_t rank_offset, const Param& p, const InitializeArguments& a,
                cudaStream_t stream) {
    const int64_t n = padded_count(a.owned);
    launch("initialize", initialize_kernel, block_count(n, THREADS), THREADS, /*shared_bytes=*/0, stream, w,
           rank_offset, a.owned, n, p.init_std, p.starts_at_one(), a.used, a.seed, a.param_index);
}

}  // namespace coat::gpu
