// gpu/report.cu - the kernel of the quantization report (interface: gpu/report.cuh).
#include "report.cuh"

#include "other_scaling.cuh"
#include "tiles.cuh"

namespace coat::gpu {
namespace {

// Where the scale of an element is: one for the tensor, in a grid of blocks, or (where neither is given) its
// group's own.
struct ScaleSource {
    const AmaxAndScale* tensor = nullptr;
    ScaleGrid blocks{};

    __device__ float at(float fmax, int64_t row, int64_t col, float group) const {
        if (blocks.scales) return *blocks.at(row, col);
        if (!tensor) return group;
        return tensor->from_history > 0 ? tensor->from_history : scale_of(fmax, tensor->amax);
    }
};

template <class Producer>
__global__ void __launch_bounds__(TILE_THREADS)
    measure_kernel(Producer x, int64_t rows, ScaleSource scales, bool e5m2, float fmax, QuantStats* stats) {
    const TilePlace at;
    Counts counts;
    for_each_row(x, at, rows, [&](int i, const Values(&v)[Producer::PLANES], bool live) {
        for (int p = 0; p < Producer::PLANES; p++) {
            const float group = Groups::group_scale(v[p]);  // both threads of a group compute it
#pragma unroll 1
            for (int j = 0; live && j < CHUNK; j++) {
                const float scale = scales.at(fmax, at.row + i, p * x.width + at.col + j, group);
                const float back = quantize_and_decode(e5m2, v[p][j], scale);
                // Half a step beyond FMAX is 1/28 of FMAX for E4M3 and 1/14 for E5M2; this is a little less.
                const float limit = fmax * scale * (1 + (e5m2 ? 0x1p-4f : 0x1p-5f));
                counts.add(v[p][j], back);
                counts.saturated += fabsf(v[p][j]) > limit;
                counts.flushed += v[p][j] != 0 && back == 0;
            }
        }
    });
    counts.add_to(stats);
}

}  // namespace

void measure(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s) {
    if (!stats || x.rows == 0) return;
    const Quant& q = out.view.quant;
    auto with_scales = [&](const ScaleSource& scales) {
        with_bf16_producer(x, [&](auto producer) {
            launch("measure", measure_kernel<decltype(producer)>, tile_grid(x.rows, producer.width),
                   TILE_THREADS, 0, s, producer, x.rows, scales, q.format == Format::E5M2,
                   info(q.format).max, stats);
        });
    };
    if (in_groups(q)) return with_scales({});
    if (q.granularity == PER_TENSOR) return with_scales({amax_and_scale(out.view), {}});
    for (bool transposed : {false, true}) {
        const ScaleGrid grid = scale_grid(out, transposed);
        const bool same = transposed && out.view.data && q.granularity.symmetric();  // as the row-major ones
        if (grid.scales && !same) with_scales({nullptr, grid});
    }
}

}  // namespace coat::gpu
