// program/train.cpp - the training loop. Every rank goes through it, and all ranks take the same decisions.
// Besides run.h it uses these things of other files:
//   checkpoints.h        create_and_lock_output_folder(), save(), save_last(), note_checkpoint(),
//                        read_or_fail_together()
//   clock.h              now(): the time in seconds. seconds_per_minute()
//   report.h             what is printed: validate_and_report(), print_step(), ...
//   processes.h          signal_received: the signal that has come to this process, or 0
//   data/checkpoint.h    find_checkpoint(). LoopState, the type of run.state
//   common/text.h        printable(): text that a terminal can show
#include <cmath>

#include "../data/files.h"
#include "checkpoints.h"
#include "clock.h"
#include "report.h"
#include "train.h"

namespace coat {

namespace {

// Where the loop is in the run. Times are those of now(), in seconds.
struct Progress {
    int64_t steps_before;      // the steps that the run had made when this program started
    double started, saved_at;  // when the loop began, and when it last saved
    double save_interval;      // between saves, without --save-every
    double step_seconds = 0;   // what all steps but the first took. (The first step warms caches.)
    // How many steps in a row were skipped, up to now. (A step without targets does not count.)
    int skipped_in_a_row = 0;
};

// What has happened during a step that the loop must react to.
struct Events {
    int signal;  // the signal that has come; 0: none
    bool save_interval_has_passed;
};

// If there is no --save-every, the run is saved every 30 minutes. (Tests have shorter minutes.)
double default_save_interval() { return 30 * seconds_per_minute(); }

void train_step(Run& run, Progress& progress);
Events events_on_all_ranks(Run& run, const Progress& progress);
int save_and_end_at_signal(Run& run, int signal);
int finish(Run& run, const Progress& progress);

}  // namespace

int train(Run& run) {
    const Flags& flags = run.flags;
    // Error messages name the last checkpoint. A run that is resumed in its own folder has one from the start
    if (!flags.out.empty()) note_checkpoint(run, find_checkpoint(flags.out));
    if (run.state.step == 0) run.state.first_validation = validate_and_report(run);
    create_and_lock_output_folder(run);
    Progress progress{.steps_before = run.state.step,
                      .started = now(),
                      .saved_at = now(),
                      .save_interval = default_save_interval()};
    const auto every = [&](int64_t steps) { return steps > 0 && run.state.step % steps == 0; };
    while (run.state.step < flags.steps) {
        train_step(run, progress);
        const bool last = run.state.step == flags.steps;  // finish() validates and saves it
        const Events events = events_on_all_ranks(run, progress);
        if (events.signal && !last) return save_and_end_at_signal(run, events.signal);
        if (!last && every(flags.eval_every)) validate_and_report(run);
        if (flags.sample_every > 0 && (last || every(flags.sample_every))) report_sample(run);
        const bool is_save_time =
            flags.save_every > 0 ? every(flags.save_every) : events.save_interval_has_passed;
        // While steps are skipped, the weights may be useless: see count_step()
        if (!last && is_save_time && progress.skipped_in_a_row == 0) {
            save(run);  // if that fails, the run goes on until the next save
            progress.saved_at = now();
        }
    }
    return finish(run, progress);
}

namespace {

// Reads this rank's micro-batches of the next step. Ranks take micro-batches in turn. So a step has the same
// micro-batches on one rank with a larger --accumulate as on several ranks.
void read_step(Run& run) {
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

// The arguments of the next update.
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

// Counts the step that was just made. A skipped step
//   - counts for the schedule and the data, or it would come again;
//   - does not count for AdamW's bias correction;
//   - is a sign that the run diverges, unless the text of the step has no targets.
void count_step(Run& run, const StepResult& result, Progress& progress) {
    run.state.step++;
    if (!result.skipped) {
        run.state.updates++;
        progress.skipped_in_a_row = 0;
    } else if (result.target_count) {
        progress.skipped_in_a_row++;
    }
    // If the run ends early, because a signal comes or data cannot be read, this step may be saved. After a
    // step that was skipped for its loss or gradients it is not: an update before it may have made weights
    // overflow. But if there is no earlier checkpoint, it is saved all the same.
    run.at_savable_step = progress.skipped_in_a_row == 0 || run.last_checkpoint.empty();
}

// One optimizer step: reads its micro-batches, updates the model, counts and prints the step. Error if so
// many steps in a row were skipped that the run has diverged.
void train_step(Run& run, Progress& progress) {
    constexpr int SKIPS_OF_DIVERGED_RUN = 20;  // in a row
    const double before = now();
    const AdamWOptions adamw = options_of_next_update(run);
    read_step(run);
    // If step() fails, some weights may be updated and others not. Such weights are not saved.
    run.at_savable_step = false;
    const StepResult result = run.model->step(run.tokens.data(), run.targets.data(), adamw);
    count_step(run, result, progress);

    const double seconds = now() - before;
    const double steps_made = double(run.state.step - progress.steps_before);
    if (steps_made > 1) progress.step_seconds += seconds;
    // The rest of the run is estimated from all time since the loop began. Validations, samples and saves
    // count, because the rest of the run has them, too. So the estimate rises after each of them.
    const double seconds_per_step = (now() - progress.started) / steps_made;
    const double seconds_left = seconds_per_step * double(run.flags.steps - run.state.step);
    print_step(run, result, adamw.lr, seconds, seconds_left);
    if (progress.skipped_in_a_row == SKIPS_OF_DIVERGED_RUN)
        throw Error("In ", SKIPS_OF_DIVERGED_RUN,
                    " steps in a row the loss, a gradient or a quantized tensor was not ",
                    "finite, or the clipped norm was 2^62 or more; begin again with a lower --lr, or with ",
                    "other weights.");
}

// Returns the same events on all ranks, so that all ranks do the same. A signal to one rank stops all ranks.
// The save interval is measured by the clock of rank 0.
Events events_on_all_ranks(Run& run, const Progress& progress) {
    const Events mine{.signal = signal_received,
                      .save_interval_has_passed = now() - progress.saved_at >= progress.save_interval};
    const std::vector<Events> by_rank = run.processes.all_gather(mine);
    Events all = by_rank[0];
    for (const Events& theirs : by_rank) all.signal = std::max(all.signal, theirs.signal);
    return all;
}

// Saves the step after which a signal has come, and says how the run can go on. Returns the exit code: that
// of a program that a signal has ended, even if --out could not be written.
int save_and_end_at_signal(Run& run, int signal) {
    if (run.at_savable_step) save_last(run);
    std::string how_to_continue = "; nothing was saved.";
    const fs::path checkpoint = run.last_checkpoint;
    if (!checkpoint.empty())
        how_to_continue = ": continue with --resume " + checkpoint.parent_path().string();
    std::printf("Interrupted after step %ld%s\n", run.state.step, printable(how_to_continue).c_str());
    return 128 + signal;
}

// Validates and saves the last step, and prints what the run was. The step is saved even if it was skipped,
// because its validation has shown that the weights are not useless. Returns the exit code: not 0 if --out
// could not be written.
int finish(Run& run, const Progress& progress) {
    const double validation = validate_and_report(run);  // throws if the loss is not finite
    const int code = save_last(run);
    report_quantization(run);
    print_end(run, validation,
              {.steps = run.state.step - progress.steps_before,
               .seconds = now() - progress.started,
               .step_seconds = progress.step_seconds});
    return code;
}

}  // namespace

// -----------------------------------------------------------------------------------------------------------
// The learning rate

int64_t warmup_steps(int64_t warmup, int64_t steps) {
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

}  // namespace coat
