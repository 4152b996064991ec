// gpu/extra_buffers.cpp - the sizes of buffers that some runs need besides (gpu/extra_buffers.h).
#include "extra_buffers.h"

namespace coat {

GradientBufferSizes gradient_buffer_sizes(const RunSettings& s) {
    GradientBufferSizes sizes;
    for (const BucketRange& bucket : bucket_ranges(parameters(s.config)))
        if (bucket.first_param == 0 && s.config.tied) sizes.embedding = bucket.elements;
        else sizes.largest = std::max(sizes.largest, bucket.elements);
    return sizes;
}

ReceivedBytes received_bytes(const RunSettings& s) {
    ReceivedBytes most;
    const std::vector<Param> params = parameters(s.config);
    for (const BucketRange& b : bucket_ranges(params)) {
        int64_t elements = 0;  // the most that a rank owns of the bucket
        // The matrices of a weight set are in one bucket. The vectors of the bucket count here, too, but they
        // are small
        int64_t gathered = 0;
        for (size_t i = b.first_param; i < b.end_param; i++) {
            const int64_t most_units = ceil_div(ceil_div(params[i].size(), UNIT_SIZE), s.ranks);
            elements += params[i].is_vector() ? params[i].padded_size() : most_units * UNIT_SIZE;
            gathered += gathered_bytes(s, params[i]);
        }
        most.gradients =
            std::max(most.gradients, (s.ranks - 1) * elements * format_info(gradient_format(s)).bytes);
        most.matrices = std::max(most.matrices, gathered);
    }
    return most;
}

}  // namespace coat
