// gpu/norm.cu - the residual sum, RMSNorm and LayerNorm on the GPU, forward. One kernel makes the sum and
// what the norm of the sum needs. gpu/norm.h says what this is, and why.
#include "norm.cuh"

namespace coat::gpu {
namespace {

// x: the thread's chunks of one input row. Returns the largest magnitude of the norm's output in these
// chunks. A chunk that is not live lies past the end of the row, or its row lies past the last row.
template <class Element, class IsLive>
__device__ float amax_of_norm(const Norm& norm, const ChunkValues (&x)[MAX_CHUNKS_PER_THREAD],
                              RowStatistics statistics, IsLive is_live) {
    float largest = 0;
    for (int c = 0; c < MAX_CHUNKS_PER_THREAD; c++) {
        if (!is_live(c)) continue;
        ChunkValues weight, bias;
        plain_view<Element>(norm.weight).load_values(first_column_of_chunk(c), weight);
        load_bias(plain_view<Element>(norm.bias), first_column_of_chunk(c), bias);
        for (int j = 0; j < CHUNK_SIZE; j++)
            largest = larger_magnitude(largest, norm_output(x[c][j], statistics, weight[j], bias[j]));
    }
    return largest;
}

// The kernel adds rows of two tensors, a and b. Row r of the sum is
//   residual_add()   a[r] + b[r]: the residual stream and a branch
//   embed()          a[tokens[r]] + b[r % T]: the embedding and the positions (this can wait)
struct Summands {
    TensorRef a, b;                   // b may be no tensor
    const int32_t* tokens = nullptr;  // null in residual_add()
    int64_t T = 1;
};

// The kernel of residual_add() and of embed(). gpu/norm.h says what it writes; norm_input is the view of
// norm.input.
template <class StoredView, class Element = typename StoredView::ComputeElement>
__global__ void __launch_bounds__(32 * MAX_WARPS_PER_TEAM)
    residual_add_kernel(const Summands summands, const Norm norm, StoredView norm_input,
                        PlainView<Element> plain_sum, float* norm_output_amax_to_raise) {
    using StoredChunk = typename PlainView<Element>::StoredChunk;
    const auto a = plain_view<Element>(summands.a.data), b = plain_view<Element>(summands.b.data);
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    const int64_t rows = norm.input.rows, C = norm.input.cols;
    auto is_live = [&](int c) { return row < rows && first_column_of_chunk(c) < C; };
    int64_t row_of_a = row, row_of_b = row;
    if (summands.tokens) {  // embed()
        if (row < rows) row_of_a = summands.tokens[row];
        // In 32 bits a division has far fewer instructions than in 64. No GPU has memory for 2^32 rows.
        row_of_b = uint32_t(row) % uint32_t(summands.T);
    }
    StoredChunk loaded_a[MAX_CHUNKS_PER_THREAD] = {}, loaded_b[MAX_CHUNKS_PER_THREAD] = {};
    for (int c = 0; c < MAX_CHUNKS_PER_THREAD; c++) {
        if (!is_live(c)) continue;
        loaded_a[c] = a.load(row_of_a * C + first_column_of_chunk(c));
        if (b.data) loaded_b[c] = b.load(row_of_b * C + first_column_of_chunk(c));
    }
    ChunkValues sum[MAX_CHUNKS_PER_THREAD];
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS_PER_THREAD; c++) {
        const int64_t i = row * C + first_column_of_chunk(c);
        a.unpack(loaded_a[c], sum[c]);
        if (b.data) {
            ChunkValues b_values;
            b.unpack(loaded_b[c], b_values);
            for (int j = 0; j < CHUNK_SIZE; j++) sum[c][j] = __fadd_rn(sum[c][j], b_values[j]);
        }
        plain_sum.store(i, sum[c], is_live(c) && plain_sum.data != nullptr);
        // Rounds the sum to what the norm will read, in coat to groups.
        norm_input.round_and_store(i, sum[c], is_live(c));
    }
    const RowStatistics statistics = compute_row_statistics(sum, C, norm.rms, norm.eps);
    if (row < rows && threadIdx.x == 0) norm.row_statistics[row] = statistics;
    if (norm_output_amax_to_raise)
        raise_amax_by_warp(norm_output_amax_to_raise,
                           magnitude_bits(amax_of_norm<Element>(norm, sum, statistics, is_live)));
}

// Launches residual_add_kernel(); the two operators below say what it does.
void launch_residual_add(const char* what, const Summands& summands, const Norm& norm,
                         const TensorRef& plain_sum, float* norm_output_amax_to_raise, cudaStream_t stream) {
    const dim3 block = block_shape(norm.input.cols);
    with_view(norm.input, [&](auto norm_input) {
        using StoredView = decltype(norm_input);
        using Element = typename StoredView::ComputeElement;
        launch(what, residual_add_kernel<StoredView>, block_count(norm.input.rows, block.y), block,
               /*shared_bytes=*/0, stream, summands, norm, norm_input, plain_view<Element>(plain_sum.data),
               norm_output_amax_to_raise);
    });
}

}  // namespace

void residual_add(const TensorRef& x, const TensorRef& branch, const Norm& norm, const TensorRef& plain_sum,
                  float* norm_output_amax_to_raise, cudaStream_t stream) {
    launch_residual_add("residual_add", {.a = x, .b = branch}, norm, plain_sum, norm_output_amax_to_raise,
                        stream);
}

void embed(const TensorRef& embedding, const TensorRef& positions, const int32_t* tokens, int64_t T,
           const Norm& norm, const TensorRef& plain_sum, float* norm_output_amax_to_raise,
           cudaStream_t stream) {
    launch_residual_add("embed", {.a = embedding, .b = positions, .tokens = tokens, .T = T}, norm, plain_sum,
                        norm_output_amax_to_raise, stream);
}

}  // namespace coat::gpu
