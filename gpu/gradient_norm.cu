// gpu/gradient_norm.cu - the norm of all gradients, clipping, and steps that are skipped
// (gpu/gradient_norm.h).
#include "gradient_norm.h"
#include "../common/ranks.h"
#include "layers.cuh"

namespace coat::gpu {

constexpr int THREADS = 256;  // threads of a block

static __global__ void __launch_bounds__(THREADS)
    write_loss_or_nan_kernel(const TensorScale* entries, int64_t n, const double* loss, double* loss_or_nan) {
    bool finite = true;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) finite = finite && isfinite(entries[i].amax);
    finite = __syncthreads_and(finite);
    if (threadIdx.x == 0) *loss_or_nan = finite && !isnan(*loss_or_nan) ? *loss : NAN;
}

void write_loss_or_nan(const TensorScale* entries, int64_t n, const double* loss, double* loss_or_nan,
                       cudaStream_t stream) {
    launch("write_loss_or_nan", write_loss_or_nan_kernel, 1, THREADS, /*shared_bytes=*/0, stream, entries, n,
           loss, loss_or_nan);
}

// The sum of squares of a chunk. It is computed in FP32 if it lies between 2^-80 and 2^80, else in double,
// because squares in FP32 could overflow or vanish.
static __device__ double square_sum_of_chunk(const ChunkValues& v) {
    float sum = 0;
    for (int j = 0; j < CHUNK_SIZE; j++) sum += v[j] * v[j];
    if (sum > 0x1p-80f && sum < 0x1p+80f) return sum;
    double exact = 0;
    for (int j = 0; j < CHUNK_SIZE; j++) exact += double(v[j]) * v[j];
    return exact;
}

// A warp computes the sum of squares of one unit: of the elements first to end - 1 of a parameter, whose
// element 0 is gradients[param_first].
constexpr int LOADS_IN_FLIGHT = 4;
static __device__ double square_sum_of_unit(const Bf16OrFp32View& gradients, int64_t param_first,
                                            int64_t first, int64_t end) {
    constexpr int WARP_ELEMENTS = 32 * CHUNK_SIZE;
    double sum = 0;
    for (int64_t i = first + threadIdx.x % 32 * CHUNK_SIZE; i < end; i += WARP_ELEMENTS * LOADS_IN_FLIGHT) {
        Bf16OrFp32View::StoredChunk loaded[LOADS_IN_FLIGHT] = {};
        for (int load = 0; load < LOADS_IN_FLIGHT; load++)
            if (i + load * WARP_ELEMENTS < end)
                loaded[load] = gradients.load(param_first + i + load * WARP_ELEMENTS);
        for (int load = 0; load < LOADS_IN_FLIGHT; load++) {
            ChunkValues v;
            gradients.unpack(loaded[load], v);
            sum += square_sum_of_chunk(v);
        }
    }
    return sum_of_warp(sum);
}

// Writes the sums of squares of all units of the parameters. The warps of the grid take the units in turn,
// counted over all parameters: of w warps, warp i takes the units i, i + w, i + 2 w, ...
//   first_element   the element of memory order with which the gradients begin
//   first_unit      the number of the first unit, to which the first sum belongs
constexpr int SQUARES_BLOCKS_PER_SM = 8;
static __global__ void __launch_bounds__(THREADS)
    compute_gradient_squares_kernel(const AdamWParam* params, int param_count, Bf16OrFp32View gradients,
                                    int64_t first_element, int64_t first_unit, const double* loss_or_nan,
                                    double* loss_and_squares) {
    const int lane = threadIdx.x % 32;
    const int64_t warp = thread_of_grid() / 32, warps = int64_t(gridDim.x) * THREADS / 32;
    if (warp == 0 && lane == 0) loss_and_squares[0] = *loss_or_nan;
    int64_t unit = warp;  // counted from the first unit of the parameter
    for (int i = 0; i < param_count; i++) {
        const AdamWParam& param = params[i];
        const int64_t unit_count = ceil_div(param.size, UNIT_SIZE);
        const int64_t param_first = param.memory_offset - first_element;
        double* const sums_of_param = loss_and_squares + 1 + param.first_unit - first_unit;
        for (; unit < unit_count; unit += warps) {
            const int64_t first = unit * UNIT_SIZE, end = min(param.size, first + UNIT_SIZE);
            const double sum = square_sum_of_unit(gradients, param_first, first, end);
            if (lane == 0) sums_of_param[unit] = sum;
        }
        unit -= unit_count;  // from here on counted from the first unit of the next parameter
    }
}

void compute_gradient_squares(const ParamsToUpdate& params, const Range& units, const double* loss_or_nan,
                              double* loss_and_squares, cudaStream_t stream) {
    // (Units that other ranks sum stay 0 here.)
    clear_async(loss_and_squares, (1 + units.count) * int64_t(sizeof(double)), stream);
    const unsigned most_blocks = unsigned(SQUARES_BLOCKS_PER_SM * multiprocessors());
    // A warp for each unit, and one more: the loss has to be written even if there are no units.
    const unsigned useful_blocks = block_count(32 * units.count + 32, THREADS);
    launch("compute_gradient_squares", compute_gradient_squares_kernel, std::min(useful_blocks, most_blocks),
           THREADS, /*shared_bytes=*/0, stream, params.table, params.count,
           bf16_or_fp32(params.gradients, params.gradient_format), params.elements.first, units.first,
           loss_or_nan, loss_and_squares);
}

// Adds the squares of the units to the state (adamw.h, GradientState). There is one block.
constexpr int STATE_THREADS = 1024;
static __global__ void __launch_bounds__(STATE_THREADS)
    update_gradient_state_kernel(const double* loss_and_squares, int64_t unit_count, int64_t ranks,
                                 float clip_limit, GradientState* state) {
    double mine = 0;
    for (int64_t unit = threadIdx.x; unit < unit_count; unit += STATE_THREADS) {
        // The sum of a unit is the largest that a rank has. NaN counts as larger than any number
        double sum = 0;
        for (int64_t r = 0; r < ranks; r++) {
            const double theirs = loss_and_squares[r * (1 + unit_count) + 1 + unit];
            if (theirs > sum || isnan(theirs)) sum = theirs;
        }
        mine += sum;
    }
    const double sum_of_call = sum_of_block<STATE_THREADS>(mine);
    if (threadIdx.x != 0) return;
    state->sum_of_squares += sum_of_call;
    state->norm = sqrt(state->sum_of_squares);
    state->clip_factor = float(clip_limit > 0 && state->norm > clip_limit ? clip_limit / state->norm : 1.0);
    // Below 2^62, squares are below 2^124, which every format of a second moment represents. NaN fails too.
    bool usable = sqrt(sum_of_call) * state->clip_factor < 0x1p62;
    for (int64_t r = 0; r < ranks; r++)  // the losses
        usable = usable && isfinite(loss_and_squares[r * (1 + unit_count)]);
    state->skip |= !usable;
}

void update_gradient_state(const double* loss_and_squares, int64_t unit_count, int64_t ranks,
                           float clip_limit, GradientState* state, cudaStream_t stream) {
    launch("update_gradient_state", update_gradient_state_kernel, 1, STATE_THREADS, /*shared_bytes=*/0,
           stream, loss_and_squares, unit_count, ranks, clip_limit, state);
}

}  // namespace coat::gpu
