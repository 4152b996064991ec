// program/train.cpp - the training loop. Every rank goes through it, and all ranks take the same decisions.
#include "../data/files.h"
#include "checkpoints.h"
#include "clock.h"
#include "report.h"
#include "train.h"
#include "train_step.h"

namespace coat {

namespace {

// Where the loop is in the run. Times are those of now(), in seconds.
struct Progress {
    int64_t steps_before;               // the steps that the run had made when this program started
    double started, saved_at;           // when the loop began, and when it last saved
    double save_interval;               // between saves, without --save-every
    double seconds_of_later_steps = 0;  // what all steps but the first took. (The first step warms caches.)
};

// What has happened during a step that the loop must react to.
struct Events {
    int signal;  // the signal that has come; 0: none
    bool save_interval_has_passed;
};

// If there is no --save-every, the run is saved every 30 minutes. (Tests have shorter minutes.)
double default_save_interval() { return 30 * seconds_per_minute(); }

void train_and_print_step(Run& run, Progress& progress);
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
        train_and_print_step(run, progress);
        const bool last = run.state.step == flags.steps;  // finish() validates and saves it
        const Events events = events_on_all_ranks(run, progress);
        if (events.signal && !last) return save_and_end_at_signal(run, events.signal);
        if (!last && every(flags.eval_every)) validate_and_report(run);
        if (flags.sample_every > 0 && (last || every(flags.sample_every))) report_sample(run);
        const bool is_save_time =
            flags.save_every > 0 ? every(flags.save_every) : events.save_interval_has_passed;
        // While steps are skipped, the weights may be useless: see count_step() in train_step.cpp
        if (!last && is_save_time && run.skipped_in_a_row == 0) {
            save(run);  // if that fails, the run goes on until the next save
            progress.saved_at = now();
        }
    }
    return finish(run, progress);
}

namespace {

// Makes and prints a step. Error if so many steps in a row were skipped that the run has diverged.
void train_and_print_step(Run& run, Progress& progress) {
    constexpr int SKIPS_OF_DIVERGED_RUN = 20;  // in a row
    const double before = now();
    const AdamWOptions options = options_of_next_update(run);
    const StepResult result = train_step(run, options);

    const double seconds = now() - before;
    const double steps_made = double(run.state.step - progress.steps_before);
    if (steps_made > 1) progress.seconds_of_later_steps += seconds;
    // The rest of the run is estimated from all time since the loop began. Validations, samples and saves
    // count, because the rest of the run has them, too. So the estimate rises after each of them.
    const double seconds_per_step = (now() - progress.started) / steps_made;
    const double seconds_left = seconds_per_step * double(run.flags.steps - run.state.step);
    print_step(run, result, options.lr, seconds, seconds_left);
    if (run.skipped_in_a_row == SKIPS_OF_DIVERGED_RUN)
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
               .seconds_of_later_steps = progress.seconds_of_later_steps});
    return code;
}

}  // namespace

}  // namespace coat
