// gpu/other_optimizers.cu - AdamW with other moments than COAT's: in FP32 and BF16, or in FP8 and FP16 with
// one scale per tensor, as FP8-LM has them. With the optimizer `coat` it updates only norms and biases, whose
// moments are in FP32. (The kernel for FP8 moment groups is in adamw.cu.)
//
// A scale per tensor needs the largest new element of a moment before any is encoded. So there are two
// passes, which both compute the new moments. The first pass only finds the maxima and writes them to max[1],
// while max[0] still decodes the old moments. The second pass stores the new moments.
#include "adamw.cuh"

namespace coat::gpu {

// Eight old elements of a moment.
static __device__ FactoredMoments load_moment(const MomentRef& m, float fmax, int64_t i) {
    FactoredMoments old;
    if (!is_scaled(m.format)) {
        old.factor = 1.0f;
        Bf16OrFp32{m.data, m.format == Format::FP32}.load_values(i, old.multiples);
        return old;
    }
    old.factor = scale_of(fmax, m.max[0]);
    if (m.format == Format::FP16) {
        alignas(16) __half fp16[CHUNK_SIZE];
        *reinterpret_cast<uint4*>(fp16) = __ldca(static_cast<const uint4*>(m.data) + i / CHUNK_SIZE);
        for (int j = 0; j < CHUNK_SIZE; j++) old.multiples[j] = __half2float(fp16[j]);
    } else {
        decode(/*e5m2=*/m.format == Format::E5M2, __ldca(static_cast<const uint2*>(m.data) + i / CHUNK_SIZE),
               /*scale=*/1.0f, old.multiples);
    }
    return old;
}

// Rounds and stores eight new elements of a moment, of which the largest in the tensor is max[1].
static __device__ void store_moment(const MomentRef& m, float fmax, int64_t i, ChunkValues& x) {
    if (!is_scaled(m.format)) return Bf16OrFp32{m.data, m.format == Format::FP32}.store(i, x, true);
    const float inverse_scale = __frcp_rn(scale_of(fmax, m.max[1]));
    if (m.format != Format::FP16)
        return store_in_one_instruction(static_cast<uint8_t*>(m.data) + i,
                                        encode(m.format == Format::E5M2, x, inverse_scale));
    alignas(16) __half fp16[CHUNK_SIZE];
    for (int j = 0; j < CHUNK_SIZE; j++) fp16[j] = __float2half_rn(x[j] * inverse_scale);
    store_in_one_instruction(static_cast<uint16_t*>(m.data) + i, *reinterpret_cast<const uint4*>(fp16));
}

// One pass over the shards. blockIdx.y is the number of the shard. find_maxima: this is the first of two
// passes.
constexpr int ADAMW_THREADS = 256;
template <class WeightsKind>
static __global__ void __launch_bounds__(ADAMW_THREADS)
    update_other_shards_kernel(const AdamWArguments arguments, bool find_maxima) {
    const Shard shard = arguments.shards[blockIdx.y];
    if (arguments.state->skip || arguments.in_fp8_moment_groups(shard)) return;
    if (find_maxima && !is_scaled(shard.m.format) && !is_scaled(shard.v.format)) return;
    const WeightsKind weights(arguments.weights, shard.rank_offset);
    const float clip_factor = arguments.state->clip_factor;
    const float decay = shard.decays ? arguments.constants.weight_decay : 0.0f;
    uint32_t largest_bits_w = 0, largest_bits_m = 0, largest_bits_v = 0;
    for (int64_t i = thread_of_grid() * CHUNK_SIZE; i < shard.size;
         i += static_cast<int64_t>(gridDim.x) * ADAMW_THREADS * CHUNK_SIZE) {
        ChunkValues w = {}, g;
        if (!find_maxima) weights.unpack(weights.load(i), w);
        arguments.gradients.load_values(shard.rank_offset - arguments.elements.first + i, g);
        const MAndV<FactoredMoments> old{.m = load_moment(shard.m, arguments.fmax_m, i),
                                         .v = load_moment(shard.v, arguments.fmax_v, i)};
        MAndV<ChunkValues> moments = adamw_of_chunk(arguments.constants, clip_factor, decay, g, old, w);
        for (int j = 0; j < CHUNK_SIZE; j++) {
            largest_bits_m = max(largest_bits_m, magnitude_bits(moments.m[j]));
            largest_bits_v = max(largest_bits_v, magnitude_bits(moments.v[j]));
        }
        if (find_maxima) continue;
        weights.store(i, w, arguments.rounding_key, shard.flat_offset + i, true, largest_bits_w);
        store_moment(shard.m, arguments.fmax_m, i, moments.m);
        store_moment(shard.v, arguments.fmax_v, i, moments.v);
    }
    if (shard.weight_amax) update_amax_by_warp(shard.weight_amax, largest_bits_w);
    if (find_maxima && is_scaled(shard.m.format)) update_amax_by_warp(shard.m.max + 1, largest_bits_m);
    if (find_maxima && is_scaled(shard.v.format)) update_amax_by_warp(shard.v.max + 1, largest_bits_v);
}

// Before the first pass the new maxima are set to 0, because the pass only raises them.
static __global__ void clear_new_maxima_kernel(const AdamWArguments arguments) {
    const int64_t i = thread_of_grid();
    if (i >= arguments.shard_count || arguments.state->skip) return;
    const Shard& shard = arguments.shards[i];
    if (is_scaled(shard.m.format)) shard.m.max[1] = 0;
    if (is_scaled(shard.v.format)) shard.v.max[1] = 0;
}

// After the second pass the new maxima take the place of the old ones.
static __global__ void use_new_maxima_kernel(const AdamWArguments arguments) {
    const int64_t i = thread_of_grid();
    if (i >= arguments.shard_count || arguments.state->skip) return;
    const Shard& shard = arguments.shards[i];
    if (is_scaled(shard.m.format)) shard.m.max[0] = shard.m.max[1];
    if (is_scaled(shard.v.format)) shard.v.max[0] = shard.v.max[1];
}

void update_other_shards(const AdamWArguments& arguments, cudaStream_t stream) {
    if (arguments.elements.count == 0) return;
    const unsigned shards = static_cast<unsigned>(arguments.shard_count);
    const int64_t useful = ceil_div(arguments.elements.count, ADAMW_THREADS * CHUNK_SIZE);
    // If adamw_kernel updates the matrices, the rest, norm weights and biases, needs few blocks each.
    const bool no_matrices = arguments.granularity == MomentGranularity::PerMomentGroup;
    const int64_t blocks_per_shard = std::min<int64_t>(useful, no_matrices ? 8 : 4 * multiprocessors());
    const dim3 grid(static_cast<unsigned>(blocks_per_shard), shards);
    const bool one_scale = arguments.granularity == MomentGranularity::PerTensor;
    if (one_scale)
        launch("clear_new_maxima", clear_new_maxima_kernel, block_count(shards, 128), 128, /*shared_bytes=*/0,
               stream, arguments);
    with_weights(arguments.weights, [&]<class WeightsKind>() {
        const auto kernel = update_other_shards_kernel<WeightsKind>;
        if (one_scale)
            launch("update_other_shards", kernel, grid, ADAMW_THREADS, /*shared_bytes=*/0, stream, arguments,
                   true);
        launch("update_other_shards", kernel, grid, ADAMW_THREADS, /*shared_bytes=*/0, stream, arguments,
               false);
    });
    if (one_scale)
        launch("use_new_maxima", use_new_maxima_kernel, block_count(shards, 128), 128, /*shared_bytes=*/0,
               stream, arguments);
}

}  // namespace coat::gpu
