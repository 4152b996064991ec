// coat.cu - section 5 of the paper on the GPU: mixed granularity and group scaling (interface: coat.h; the
// same arithmetic on the CPU: reference/quantize.cpp).
//
//   1. the amax of a tensor (group scaling)
//   2. values without codes
//   3. groups, for what norms and activation functions save (mixed granularity)
//   4. codes with one scale for the tensor, for GEMMs, and the choice between codes and values
//
// The simplest kernel comes first. Every kernel here goes through a tensor with for_each_row() of
// gpu/lazy_tensor.cuh. A kernel reads each of its inputs once, and most kernels are bound by memory
// bandwidth. An element takes 2 bytes in BF16, 1 as the FP8 code of an operand, and 9/8 in groups: its code,
// and a 16th of a scale of 2 bytes.
//
// Who calls whom, for the operand of a GEMM. On the host, where gpu/linear.cpp calls the first function:
//
//   write_operand()                          part 4            chooses: codes, or values without codes
//     quantize_operand()                     part 4            chooses: E4M3 or E5M2, and whether the
//                                                              transposed codes are made
//       with_producer_of_bf16_or_groups()    lazy_tensor.cuh   chooses: the producer that computes x
//         launch()                           device.cuh        starts quantize_operand_kernel()
//
// And on the GPU:
//
//   quantize_operand_kernel()              part 4            a thread block: one tile
//     quantize_tile()                      quantize.cuh      the codes of the tile, both ways
//       for_each_row()                     lazy_tensor.cuh   a thread's 8 rows
//         load(), compute()                lazy_tensor.cuh   the values of a chunk, by the producer
//         encode()                         device.cuh        the codes of these values
//       TransposeTile                      quantize.cuh      to shared memory, and back
//
// What is called here of gpu/other_scaling.h and gpu/quant_report.h can wait: other recipes, and a report of
// the errors of quantization. dev/ladders/quantize_transpose.cu shows how part 4 became fast, starting from
// two simple kernels.
#include "coat.h"

#include "gpu/other_scaling.h"
#include "gpu/quant_report.h"
#include "gpu/quantize.cuh"

namespace coat::gpu {

// ===========================================================================================================
// 1. Group scaling: the amax of a tensor in two stages
//
// The paper finds an amax in two stages, which it calls Group Scaling. Stage one finds the amax of each part
// of the tensor. Stage two finds the largest of these amaxes. (The parts need not be the groups of part 3:
// however a tensor is cut into parts, the largest amax is the same.)
//
//             in the paper          here
//   a part    a 1xG group           the elements that a warp has
//   stage 1                         the loop in compute_amax_kernel(), and the maximum over the warp in
//                                   raise_amax_by_warp() (gpu/device.cuh)
//   stage 2                         the atomicMax with which raise_amax_by_warp() ends
//
// Usually no kernel of its own is needed:
//   - A kernel that writes the input of a norm or of an activation also finds the amax of its output
//     (gpu/norm.h; for activations part 3).
//   - A kernel that writes a tensor which is quantized next (attention forward and backward on Hopper,
//     the backward pass of norms, AdamW) finds the amax of what it writes.
// The kernel below is for what no other kernel has at hand, for instance the gradient of gate and up. (Two
// tables in model.cu, which can wait, say which kernel finds which amax.)

// The kernel of compute_amax(). It does not ask whether a chunk is live: in place of one that is not,
// for_each_row() loads a chunk that is, and a copy does not change the maximum.
template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS_PER_SM)
    compute_amax_kernel(Producer producer, float* x_amax_to_raise) {
    constexpr int PLANES = Producer::PLANES;
    const ThreadTile thread_tile(blockIdx.y);
    float largest = 0;
    for_each_row(producer, thread_tile, [&](int, const ChunkValues(&v)[PLANES], bool) {
        for (int p = 0; p < PLANES; p++) largest = larger_magnitude(largest, v[p]);
    });
    raise_amax_by_warp(x_amax_to_raise, magnitude_bits(largest));
}

void compute_amax(const LazyTensor& x, float* x_amax_to_raise, cudaStream_t stream) {
    with_producer_of_bf16_or_groups(x, [&](auto producer) {
        using P = decltype(producer);
        launch("compute_amax", compute_amax_kernel<P>, tile_grid(producer.rows, producer.plane_cols),
               TILE_THREADS, /*shared_bytes=*/0, stream, producer, x_amax_to_raise);
    });
}

// ===========================================================================================================
// 2. Values without codes
//
// In coat the output of the final norm is such a tensor: the head reads it in BF16. (In recipes without FP8
// all computed operands are.)

// Stores the values of a tensor, rounded to BF16 or as FP32. A multiprocessor has two of these thread blocks,
// not TILE_BLOCKS_PER_SM, because FP32 values need more registers.
template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS, 2)
    write_values_kernel(Producer producer, Bf16OrFp32View out) {
    constexpr int PLANES = Producer::PLANES;
    const ThreadTile thread_tile(blockIdx.y);
    // `out` may be the memory of the input (the rule at for_each_row() in gpu/lazy_tensor.cuh).
    if (!thread_tile.inside(producer.rows, producer.plane_cols)) return;
    for_each_row(producer, thread_tile, [&](int i, const ChunkValues(&v)[PLANES], bool live) {
        // (With row_offset() this would take more instructions.)
        for (int p = 0; p < PLANES; p++)
            out.store(element_index<PLANES>(thread_tile.row + i, thread_tile.col, p, producer.plane_cols),
                      v[p], live);
    });
}

void write_values(const LazyTensor& x, const TensorRef& out, cudaStream_t stream) {
    require(!out.format.is_fp8(), "values are stored in BF16 or FP32");
    with_producer(x, [&](auto producer) {
        launch("write_values", write_values_kernel<decltype(producer)>,
               tile_grid(producer.rows, producer.plane_cols), TILE_THREADS, /*shared_bytes=*/0, stream,
               producer, bf16_or_fp32(out));
    });
}

// ===========================================================================================================
// 3. Mixed granularity: groups of 1 x 16, for what norms and activation functions save
//
// gpu/groups.cuh says what a group is, and has the code that makes one. Who makes groups:
//
//   of the input of the activation      quantize_to_groups_kernel(). It has this input at hand, so it also
//                                       takes the amax of the activation's output, the operand of the next
//                                       GEMM
//   of the inputs of norms              residual_add() and embed() (gpu/norm.cu)
//   of q, k, v and attention's output   quantize_to_groups_kernel(), only with --attention groups

// Returns `largest`, raised to the largest magnitude of the activation's output in one row of the thread.
template <int PLANES>
static __device__ float amax_of_activation(float largest, const ChunkValues (&v)[PLANES]) {
    for (int j = 0; j < CHUNK_SIZE; j++) {
        if constexpr (PLANES == 2) largest = larger_magnitude(largest, gated_silu(v[0][j], v[1][j]));
        else largest = larger_magnitude(largest, gelu(v[0][j]));
    }
    return largest;
}

// What quantize_to_groups_kernel() does besides quantizing x, while it has the values of x at hand.
enum class ExtraTask : uint8_t {
    Nothing,
    ActivationAmax,  // finds the amax of the activation's output, computed from what the groups hold
    WriteBack,       // for --attention groups (this can wait): writes to x what the groups hold, in BF16
};

template <class Producer, ExtraTask TASK>
static __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS_PER_SM)
    quantize_to_groups_kernel(Producer producer, GroupsView groups, float* activation_amax_to_raise) {
    constexpr int PLANES = Producer::PLANES;
    const ThreadTile thread_tile(blockIdx.y);
    // A thread outside the tensor ends here. (Why can wait: WriteBack writes over x, and for_each_row() has a
    // rule for this.) The lanes of its warp that go on do not need it:
    //   - The two lanes that have a group end together.
    //   - Shuffles and maxima are for all lanes of the warp (ALL_LANES). CUDA allows this: lanes that have
    //     exited do not count.
    //   - Lane 0 raises the amax for its warp. It has the warp's lowest row and column, so it is inside the
    //     tensor if any lane is.
    if (!thread_tile.inside(producer.rows, producer.plane_cols)) return;
    float largest = 0;
    for_each_row(producer, thread_tile, [&](int i, ChunkValues(&v)[PLANES], bool live) {
        for (int p = 0; p < PLANES; p++) {
            const int64_t first_element =
                element_index<PLANES>(thread_tile.row, thread_tile.col, p, producer.plane_cols);
            const uint32_t offset = row_offset(i, PLANES * producer.plane_cols);
            // This rounds v to what the group holds, scale * decode(code).
            groups.starting_at(first_element).round_and_store(offset, v[p], live);
            if (TASK == ExtraTask::WriteBack)
                producer.input.starting_at(first_element).store(offset, v[p], live);
        }
        // A chunk that is not live is a copy of the thread's last row, so it does not change the maximum.
        // (With WriteBack it would not be a copy; but then no maximum is taken.)
        if (TASK == ExtraTask::ActivationAmax) largest = amax_of_activation(largest, v);
    });
    if (TASK == ExtraTask::ActivationAmax)
        raise_amax_by_warp(activation_amax_to_raise, magnitude_bits(largest));
}

// PLANES is 2 if x is [gate | up], the input of a gated activation, else 1.
template <ExtraTask TASK, int PLANES = 1>
static void launch_quantize_to_groups(const TensorRef& x, const TensorRef& groups,
                                      float* activation_amax_to_raise, QuantStats* quant_stats,
                                      cudaStream_t stream) {
    require(x.format.element_format == Format::BF16, "only BF16 is quantized in groups");
    // For the report; nothing where quant_stats is null.
    measure_quant_errors(lazy_load(x), Operand{.tensor = groups}, quant_stats, stream);
    using P = LazyProducer<LazyOp::Load, PlainView<bf16>, PLANES>;
    const P producer(lazy_load(x), plain_view<bf16>(x.data));
    launch("quantize_to_groups", quantize_to_groups_kernel<P, TASK>,
           tile_grid(producer.rows, producer.plane_cols), TILE_THREADS, /*shared_bytes=*/0, stream, producer,
           groups_view(groups), activation_amax_to_raise);
}

void quantize_to_groups(const TensorRef& x, const TensorRef& groups, bool write_back, QuantStats* quant_stats,
                        cudaStream_t stream) {
    auto* launch_variant = launch_quantize_to_groups<ExtraTask::Nothing>;
    if (write_back) launch_variant = launch_quantize_to_groups<ExtraTask::WriteBack>;
    launch_variant(x, groups, /*activation_amax_to_raise=*/nullptr, quant_stats, stream);
}

void quantize_activation_input(bool gated, const TensorRef& x, const TensorRef& groups,
                               float* activation_amax_to_raise, QuantStats* quant_stats,
                               cudaStream_t stream) {
    // No amax is needed where the next GEMM reads its operands in BF16 (gpu/linear.h says when). Without an
    // amax nothing is computed from gate and up, so [gate | up] is quantized like any tensor (N, 2F). (F is a
    // multiple of 16: no group has elements of both.)
    if (!activation_amax_to_raise)
        return quantize_to_groups(x, groups, /*write_back=*/false, quant_stats, stream);
    auto* launch_variant = launch_quantize_to_groups<ExtraTask::ActivationAmax, /*PLANES=*/1>;
    if (gated) launch_variant = launch_quantize_to_groups<ExtraTask::ActivationAmax, /*PLANES=*/2>;
    launch_variant(x, groups, activation_amax_to_raise, quant_stats, stream);
}

// ===========================================================================================================
// 4. Operands of GEMMs: one scale per tensor, just in time; row-major codes, and transposed ones
//
//   scale   amax / FMAX (scale_of() in gpu/device.cuh)
//   code    x / scale, rounded to FP8. As on the CPU, a kernel multiplies by 1 / scale in FP32

// Computes x and stores its codes, with quantize_tile() of gpu/quantize.cuh. row_major is null if no
// row-major codes are wanted.
template <class Producer, Format FORMAT, bool TRANSPOSED>
static __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS_PER_SM)
    quantize_operand_kernel(Producer producer, TensorScale* tensor_scale, uint8_t* row_major,
                            uint8_t* transposed) {
    // Just in time: every thread computes the same scale from the amax.
    const float scale = scale_of(FMAX<FORMAT>, tensor_scale->amax);
    const float inverse_scale = __frcp_rn(scale);
    quantize_tile<TRANSPOSED>(producer, blockIdx.y, row_major, transposed,
                              [&](int /*row*/, int /*plane*/, const ChunkValues& v, bool /*live*/) {
                                  return same_in_both(encode<FORMAT>(v, inverse_scale));
                              });
    // The GEMM multiplies by the scale. It is stored last, so that it delays no load of x.
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) tensor_scale->scale = scale;
}

void quantize_operand(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream) {
    const TensorFormat& format = out.tensor.format;
    require(format.is_fp8() && format != E4M3_PER_1x16,
            "quantize_operand() makes the FP8 codes of a GEMM's operand, not groups");
    // Both of these are in gpu/other_scaling.cu.
    if (format.granularity != PER_TENSOR) return quantize_in_blocks(x, out, quant_stats, stream);
    if (out.delayed) return quantize_delayed(x, out, quant_stats, stream);
    measure_quant_errors(x, out, quant_stats, stream);  // first, because the codes may overwrite x
    const bool e5m2 = format.element_format == Format::E5M2;
    with_producer_of_bf16_or_groups(x, [&](auto producer) {
        using P = decltype(producer);
        auto kernel = e5m2 ? quantize_operand_kernel<P, Format::E5M2, /*TRANSPOSED=*/false>
                           : quantize_operand_kernel<P, Format::E4M3, /*TRANSPOSED=*/false>;
        if (out.transposed)
            kernel = e5m2 ? quantize_operand_kernel<P, Format::E5M2, /*TRANSPOSED=*/true>
                          : quantize_operand_kernel<P, Format::E4M3, /*TRANSPOSED=*/true>;
        launch("quantize_operand", kernel, tile_grid(producer.rows, producer.plane_cols), TILE_THREADS,
               /*shared_bytes=*/0, stream, producer, out.tensor.tensor_scale,
               static_cast<uint8_t*>(out.tensor.data), static_cast<uint8_t*>(out.transposed));
    });
}

void write_operand(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream) {
    if (out.tensor.format.is_fp8()) quantize_operand(x, out, quant_stats, stream);
    else write_values(x, out.tensor, stream);
}

}  // namespace coat::gpu
