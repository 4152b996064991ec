// gpu/quant_report.cu - the quantization report: what tensors lose is measured by a kernel, and what moments
// lose by the CPU reference.
#include "quant_report.h"

#include <cmath>

#include "../reference/optimizer.h"
#include "lazy_tensor.cuh"
#include "other_scaling.cuh"

namespace coat::gpu {

// The largest value that does not saturate, before it is multiplied by the scale: FMAX and half the distance
// from FMAX to the value below it. (The distance is 32 in E4M3, so this is 464. It is rounded to 448.)
static float saturation_limit(const FormatInfo& f) {
    return f.fmax + std::ldexp(0.5f, std::ilogb(f.fmax) - f.mantissa_bits);
}

// x as it comes back from an FP8 code.
template <Format FORMAT> static __device__ float through_fp8(float x) {
    return decode_two<FORMAT>(encode_two<FORMAT>(x, 0)).x;
}

// Adds to quant_stats what x loses if it is quantized. The scale of an element is that of the tensor, if
// tensor_scale is not null; that of its scale block, if block_scale_grid.scales is not null; else that of
// its 1x16 group, which is computed here.
template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS)
    measure_quant_errors_kernel(Producer producer, const TensorScale* tensor_scale,
                                ScaleGrid block_scale_grid, bool e5m2, float fmax, float saturation_limit,
                                QuantStats* quant_stats) {
    const ThreadTile thread_tile(blockIdx.y);
    double signal = 0, noise = 0;
    unsigned counts[3] = {};  // elements, saturated, flushed
    for_each_row(producer, thread_tile, [&](int i, const ChunkValues(&v)[Producer::PLANES], bool live) {
        for (int p = 0; p < Producer::PLANES; p++) {
            float scale = GroupsView::group_scale(v[p]);  // both threads of a group call it
            if (tensor_scale) {
                scale = tensor_scale->delayed_scale;
                if (!(scale > 0)) scale = scale_of(fmax, tensor_scale->amax);
            }
#pragma unroll 1
            for (int j = 0; live && j < CHUNK_SIZE; j++) {
                const float value = v[p][j];
                if (block_scale_grid.scales)
                    scale = *block_scale_grid.address(thread_tile.row + i,
                                                      p * producer.plane_cols + thread_tile.col + j);
                const float scaled = __fmul_rn(value, __frcp_rn(scale));
                const float decoded =
                    e5m2 ? through_fp8<Format::E5M2>(scaled) : through_fp8<Format::E4M3>(scaled);
                const float back = decoded * scale;
                const double error = double(value) - back;
                signal += double(value) * value;
                noise += error * error;
                counts[0]++;
                counts[1] += fabsf(value) > saturation_limit * scale;
                counts[2] += value != 0 && back == 0;
            }
        }
    });
    // The numbers are added up over the warp first, because all warps of the GPU add to the same totals.
    signal = sum_of_warp(signal);
    noise = sum_of_warp(noise);
    for (unsigned& n : counts) n = __reduce_add_sync(ALL_LANES, n);
    if (threadIdx.x % 32 != 0) return;
    atomicAdd(&quant_stats->signal, signal);
    atomicAdd(&quant_stats->noise, noise);
    int64_t* const totals[3] = {&quant_stats->elements, &quant_stats->saturated, &quant_stats->flushed};
    for (int i = 0; i < 3; i++) atomicAdd(reinterpret_cast<unsigned long long*>(totals[i]), counts[i]);
}

void measure_quant_errors(const LazyTensor& x, const Operand& out, QuantStats* quant_stats,
                          cudaStream_t stream) {
    if (!quant_stats) return;
    const TensorFormat& format = out.tensor.format;
    const FormatInfo& f = format_info(format.element_format);
    auto launch_with = [&](const TensorScale* tensor_scale, const ScaleGrid& block_scale_grid) {
        with_producer_of_bf16_or_groups(x, [&](auto producer) {
            launch("measure_quant_errors", measure_quant_errors_kernel<decltype(producer)>,
                   tile_grid(producer.rows, producer.plane_cols), TILE_THREADS, /*shared_bytes=*/0, stream,
                   producer, tensor_scale, block_scale_grid, format.element_format == Format::E5M2, f.fmax,
                   saturation_limit(f), quant_stats);
        });
    };
    if (format == E4M3_PER_1x16) return launch_with(nullptr, {});
    if (format.granularity == PER_TENSOR) return launch_with(out.tensor.tensor_scale, {});
    for (bool transposed : {false, true}) {
        const ScaleGrid grid = scale_grid(out, transposed);
        // Row-major and transposed codes have the same 128x128 blocks, so one of them is enough.
        const bool same = transposed && out.tensor.data && format.granularity.transpose_has_same_blocks();
        if (grid.scales && !same) launch_with(nullptr, grid);
    }
}

// The CPU reference computes and stores the moments. Of a parameter with more than MOST_MEASURED elements it
// gets only PIECES pieces of equal length, which are evenly spread.
void measure_moment_errors(const OptimizerFormats& o, const MomentRef& m, const MomentRef& v,
                           const void* gradient, Format format, int64_t count, QuantReport& report,
                           cudaStream_t stream) {
    constexpr int64_t MOST_MEASURED = 1 << 18, PIECES = 128;
    static_assert(MOST_MEASURED / PIECES % MOMENT_GROUP_SIZE == 0, "a piece consists of whole moment groups");
    if (count == 0 || (!is_fp8(m.format) && !is_fp8(v.format))) return;
    const int64_t pieces = count > MOST_MEASURED ? PIECES : 1;
    const int64_t length = std::min(count, MOST_MEASURED) / pieces;                   // of a piece
    const int64_t distance = count / pieces / MOMENT_GROUP_SIZE * MOMENT_GROUP_SIZE;  // from piece to piece
    const int64_t n = pieces * length;
    report.moments_were_sampled |= n < count;
    // Copies the pieces of a tensor to the host. It has `bytes` bytes for each `shared_by` elements of the
    // parameter.
    auto fetch_pieces = [&](auto& to, const void* from, int64_t shared_by, int64_t bytes) {
        const int64_t width = ceil_div(length, shared_by) * bytes;
        const int64_t pitch = std::max(width, distance / shared_by * bytes);
        check(cudaMemcpy2DAsync(to.data(), width, from, pitch, width, pieces, cudaMemcpyDeviceToHost, stream),
              "Reading the moments failed");
    };
    auto moment_on_host = [&](const void* data, Format f, const float* max, const float* k,
                              bool second_moment = false) {
        reference::Moment moment(o, f, n, second_moment);
        fetch_pieces(moment.elements, data, 1, format_info(f).bytes);
        if (max) fetch_pieces(moment.max_magnitudes, max, MOMENT_GROUP_SIZE, sizeof(float));
        if (k) fetch_pieces(moment.expansion_exponents, k, MOMENT_GROUP_SIZE, sizeof(float));
        check(cudaStreamSynchronize(stream), "Reading the moments failed");
        return moment;
    };
    reference::Moment stored_m = moment_on_host(m.data, m.format, m.max, m.k);
    reference::Moment stored_v = moment_on_host(v.data, v.format, v.max, v.k, /*second_moment=*/true);
    std::vector<float> g(n), w(n), new_m(n), new_v(n);
    moment_on_host(gradient, format, nullptr, nullptr).load(g.data());
    stored_m.load(new_m.data());  // adamw() makes new ones of them
    stored_v.load(new_v.data());
    reference::adamw(reference::adamw_constants({1, 0.0f}, /*decays=*/false, /*clip_factor=*/1), n, g.data(),
                     w.data(), new_m.data(), new_v.data());
    stored_m.store(new_m.data(), &report.stats_by_kind[int(MeasuredKind::Moment1)]);
    stored_v.store(new_v.data(), &report.stats_by_kind[int(MeasuredKind::Moment2)]);
}

}  // namespace coat::gpu
