// gpu/other_optimizers.cu - AdamW with moments in FP32 or BF16. With the optimizer `coat` it updates only
// norm weights and biases, whose moments are in FP32. (The kernel for FP8 moment groups is in adamw.cu.)
#include "adamw.cuh"

namespace coat::gpu {

// The elements of a moment.
static __device__ Bf16OrFp32View elements_of(const MomentRef& m) {
    return {m.data, m.format == Format::FP32};
}

// Eight old elements of a moment, from element i on.
static __device__ FactoredMoments load_moment(const MomentRef& m, int64_t i) {
    FactoredMoments old;
    old.factor = 1.0f;
    elements_of(m).load_values(i, old.multiples);
    return old;
}

// blockIdx.y is the number of the parameter.
constexpr int ADAMW_THREADS = 256;
template <class WeightsKind>
static __global__ void __launch_bounds__(ADAMW_THREADS)
    update_other_params_kernel(const AdamWArguments arguments) {
    const AdamWParam param = arguments.params[blockIdx.y];
    if (arguments.state->skip || param.has_fp8_moment_groups()) return;
    const WeightsKind weights(arguments.weights, param.memory_offset);
    const AdamWParamConstants constants = constants_of(arguments, param);
    uint32_t largest_bits = 0;  // of the new weights
    for (int64_t i = thread_of_grid() * CHUNK_SIZE; i < param.size;
         i += int64_t(gridDim.x) * ADAMW_THREADS * CHUNK_SIZE) {
        ChunkValues w, g;
        weights.unpack(weights.load(i), w);
        arguments.gradients.load_values(param.memory_offset - arguments.elements.first + i, g);
        const MAndV<FactoredMoments> old{.m = load_moment(param.m, i), .v = load_moment(param.v, i)};
        MAndV<ChunkValues> moments = adamw_of_chunk(constants, g, old, w);
        weights.store(i, w, arguments.rounding_key, param.flat_offset + i, /*live=*/true, largest_bits);
        elements_of(param.m).store(i, moments.m, /*live=*/true);
        elements_of(param.v).store(i, moments.v, /*live=*/true);
    }
    if (param.weight_amax) raise_amax_by_warp(param.weight_amax, largest_bits);
}

void update_other_params(const OptimizerFormats& optimizer, const AdamWArguments& arguments,
                         cudaStream_t stream) {
    if (arguments.elements.count == 0) return;
    const int64_t useful = ceil_div(arguments.elements.count, ADAMW_THREADS * CHUNK_SIZE);
    // If adamw_kernel updates the matrices, the rest, norm weights and biases, needs few blocks each.
    const int64_t most_blocks = optimizer.has_fp8_moment_groups() ? 8 : 4 * multiprocessors();
    const dim3 grid(unsigned(std::min(useful, most_blocks)), unsigned(arguments.param_count));
    with_weights(arguments.weights, [&]<class WeightsKind>() {
        launch("update_other_params", update_other_params_kernel<WeightsKind>, grid, ADAMW_THREADS,
               /*shared_bytes=*/0, stream, arguments);
    });
}

}  // namespace coat::gpu
