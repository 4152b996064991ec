// adamw.cuh - the paper's section 4 on the GPU: AdamW with FP8 moments and dynamic range expansion
// (adamw.cu).
//
// Parameters, their order and the table of an update are those of gpu/parameters.cuh. No function allocates
// or waits; all launch on the given CUDA stream.
#pragma once
#include "gradients.cuh"

namespace coat::gpu {

// AdamW of a range of the rank's order, whole segments: all, or those of a bucket. `segments` and `gradients`
// are those of the range; gradients are FP32 or have the format of the weights. Every segment's m.format is
// optimizer.m or FP32, and v's likewise. rounding: rounding_key() of this step, for weights without a master.
// The segments' amaxes become those of the new weights; a step that is skipped leaves all as it was.
void adamw(const AdamW& a, const OptimizerFormat& optimizer, const Segment* segments, int number_of_segments,
           const Slice& range, const Weights& w, uint64_t rounding, const void* gradients, Format format,
           const GradientState* state, cudaStream_t s);

}  // namespace coat::gpu
