// program/train_step.cpp - one step of training (interface: train_step.h). Every rank goes through it.
//
// run.h says what a Run is. For a step these of its members matter:
//   flags, settings          the command line; the settings of the model
//   state                    how many steps and updates the run has made
//   training_loader          which gives a micro-batch of tokens and targets for a number
//   tokens, targets          where the micro-batches of a step are read to
//   model                    the Model (common/model.h) on a GPU or on the CPU
//   skipped_in_a_row, at_savable_step, last_checkpoint
//                            whether an early end of the run may save this step
#include "train_step.h"

#include <cmath>

#include "checkpoints.h"  // read_or_fail_together(): if a rank cannot read, all ranks end the run

namespace coat {

int64_t warmup_steps(int64_t warmup, int64_t steps) {
    // --steps 0 evaluates, and trains no step whose warm-up could be shortened.
    return steps > 0 && warmup > steps ? steps / 10 : warmup;
}

// As in the paper's runs, the rate ends at a tenth of the peak. The rate of the first step is above 0, so no
// step is lost.
float learning_rate(double peak, int64_t warmup, int64_t steps, int64_t step) {
    constexpr double FLOOR = 0.1;
    constexpr double PI = 3.14159265358979323846;
    warmup = warmup_steps(warmup, steps);
    if (step < warmup) return float(peak * (step + 1) / warmup);
    // The n steps after the warm-up follow a cosine of length n, as in nanoGPT and torchtitan. The last of
    // them lies at (n - 1) / n of the cosine. In a short run that is far from its end: with n = 3 the run
    // would end at 0.33 of the peak. So for n < 100 the cosine is shorter: the last step lies at 0.99 of it,
    // where the rate is at most 0.1002 of the peak.
    const double n = double(steps - warmup);
    const double length = std::max(1.0, std::min(n, (n - 1) / 0.99));
    const double fraction = std::min(1.0, double(step - warmup) / length);  // of the cosine
    return float(peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + std::cos(fraction * PI))));
}

AdamWOptions options_of_next_update(const Run& run) {
    const Flags& flags = run.flags;
    const LoopState& state = run.state;
    return {.update_number = state.updates + 1,
            .lr = learning_rate(flags.lr, flags.warmup, flags.steps, state.step),
            .beta1 = float(flags.beta1),
            .beta2 = float(flags.beta2),
            .weight_decay = float(flags.weight_decay),
            .clip = float(flags.clip)};
}

// Reads this rank's micro-batches of the next step. Ranks take micro-batches in turn. So a step has the same
// micro-batches on one rank with a larger --accumulate as on several ranks.
static void read_step(Run& run) {
    const RunSettings& s = run.settings;
    const int64_t n = run.micro_batch_tokens();
    const int64_t first = run.state.step * micro_batches_of_step(s) + s.rank;
    run.tokens.resize(s.micro_batches_per_rank * n);
    run.targets.resize(s.micro_batches_per_rank * n);
    read_or_fail_together(run, [&] {
        for (int64_t i = 0; i < s.micro_batches_per_rank; i++)
            run.training_loader->read(first + i * s.ranks, &run.tokens[i * n], &run.targets[i * n]);
    });
}

// Counts the step that was just made. A skipped step
//   - counts for the schedule and the data, or the next step would have the same data;
//   - does not count for AdamW's bias correction;
//   - is a sign that the run diverges, unless the text of the step has no targets.
static void count_step(Run& run, const StepResult& result) {
    run.state.step++;
    if (!result.skipped) {
        run.state.updates++;
        run.skipped_in_a_row = 0;
    } else if (result.scored_target_count) {
        run.skipped_in_a_row++;
    }
    // Whether this step is saved if the run ends early, because a signal comes or data cannot be read. It is
    // not if the last steps were skipped for their loss or gradients, because then an earlier update may have
    // made weights overflow. Without an earlier checkpoint to go back to, it is saved in any case.
    run.at_savable_step = run.skipped_in_a_row == 0 || run.last_checkpoint.empty();
}

StepResult train_step(Run& run, const AdamWOptions& options) {
    read_step(run);
    // If step() fails, some weights may be updated and others not. Such weights are not saved.
    run.at_savable_step = false;
    const StepResult result = run.model->step(run.tokens.data(), run.targets.data(), options);
    count_step(run, result);
    return result;
}

}  // namespace coat
