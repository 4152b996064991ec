// gpu/gradient_norm.h - the norm of all gradients, the factor that clips them, and steps that are skipped. A
// step calls these three functions in this order: after each micro-batch the first, and before the update
// the others.
//
// The rules and the words of gpu/tensors.h and adamw.h hold here.
#pragma once
#include "../adamw.h"

namespace coat::gpu {

// *loss_or_nan = *loss, or NaN if one of n amaxes is not finite. If *loss_or_nan is infinite or NaN,
// update_gradient_state() skips the step. Once it is NaN, it stays NaN for the rest of the step.
//   entries   of the ScaleTable (gpu/scale_table.h), each with an amax
void write_loss_or_nan(const TensorScale* entries, int64_t n, const double* loss, double* loss_or_nan,
                       cudaStream_t stream);

// Computes the sums of squares of the gradients, one for each unit (gpu/memory_layout.h). The loss and
// the sums are one row, loss_and_squares (1 + units.count), so that with several ranks one message has
// both:
//   loss_and_squares[0]       *loss_or_nan
//   loss_and_squares[1 + u]   the sum of squares of the unit units.first + u
void compute_gradient_squares(const ParamsToUpdate& params, const Range& units, const double* loss_or_nan,
                              double* loss_and_squares, cudaStream_t stream);
// Completes the state: adds up the squares, and computes the norm, the factor that clips it, and whether the
// step is skipped. A step makes one call, for all its gradients. (With --gradients none it makes a call for
// each bucket, and state->norm is the norm of the buckets so far.) clip_limit is the largest norm that is
// not clipped; 0 means that nothing is clipped. The step is skipped for one of the first two reasons of
// StepResult::skipped (common/step.h). (With --gradients none the second reason looks at the norm of the
// gradients of this call.)
//
// loss_and_squares: (ranks, 1 + unit_count), with one GPU one row.
//
// The rest can wait: how several ranks add their rows. A unit of a matrix has its sum on the rank that owns
// it, and 0 on the others. A unit of a vector has the same sum on all ranks. Either way the largest of the
// ranks' numbers is the sum. For example, of three units rank 0 owns the first, rank 1 owns the second, and
// the third is a vector. Rank 0 has the sums (5, 0, 2), rank 1 has (0, 3, 2), and the result is 5 + 3 + 2. So
// the result is the same for any number of ranks. If the loss of one rank is not finite, all ranks skip the
// step.
void update_gradient_state(const double* loss_and_squares, int64_t unit_count, int64_t ranks,
                           float clip_limit, GradientState* state, cudaStream_t stream);

}  // namespace coat::gpu
