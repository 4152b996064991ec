// program/train_step.h - one step of training: its tokens, its learning rate, and how it is counted
// (train_step.cpp). The loop around it is in train.cpp.
#pragma once
#include "run.h"

namespace coat {

// The steps of warm-up that a run makes. With a warm-up that is longer than the run, the learning rate would
// never reach the peak. So such a warm-up is shortened to a tenth of the run. For example, in a run of 100
// steps --warmup 101 becomes 10. But --warmup 100 stays 100: the last step reaches the peak.
int64_t warmup_steps(int64_t warmup, int64_t steps);
// The learning rate of one step, counted from 0: linear warm-up to the peak, then half a cosine to a tenth of
// the peak. If fewer than two steps follow the warm-up, the run ends at the peak.
float learning_rate(double peak, int64_t warmup, int64_t steps, int64_t step);

// The arguments of the next update.
AdamWOptions options_of_next_update(const Run& run);
// Reads the micro-batches of the next step, updates the model with these options, and counts the step.
StepResult train_step(Run& run, const AdamWOptions& options);

}  // namespace coat
