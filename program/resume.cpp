// program/resume.cpp - how a run continues a checkpoint (--resume).
#include <cstdio>

#include "../data/files.h"
#include "resume.h"
#include "train_step.h"

namespace coat {

std::string folder_of_resumed(const Flags& flags) {
    const std::string last = find_checkpoint(flags.resume);
    if (last.empty())
        throw Error("--resume ", flags.resume, " has no complete checkpoint; give another folder.");
    return fs::canonical(last).parent_path().string();
}

// Says which checkpoints are skipped because they are not whole. Renames them if their folder is locked.
static void set_aside_skipped(const std::vector<WholeCheckpoint::Skipped>& skipped,
                              const std::string& locked_out) {
    for (const auto& [path, why] : skipped) {
        print_error(
            concat("The checkpoint ", path, " is damaged, so the run goes on from an older one. ", why));
        if (locked_out.empty() || !fs::equivalent(fs::path(path).parent_path(), locked_out)) continue;
        const std::string renamed = set_aside(path);
        print_error(concat(path, " is now ", renamed, "."));
    }
}

// How the given flags change the steps to come, as a sentence: "after step 4: --lr 1e-4 (before: 3e-3)".
static std::string sentence_of_change(const Flags& flags, const Resumed& resumed,
                                      const std::string& changes) {
    const ordered_json& before = resumed.flags_of_checkpoint;
    const int64_t step = resumed.state.step;
    const float planned =  // the learning rate of the next step, without a change
        learning_rate(before.at("lr"), before.at("warmup"), before.at("steps"), step);
    const float lr = learning_rate(flags.lr, flags.warmup, flags.steps, step);
    char rates[100] = "";
    if (lr != planned)
        std::snprintf(rates, sizeof rates, "; the next step's learning rate is %.3e (before: %.3e)", lr,
                      planned);
    return concat("after step ", step, ": ", changes, rates);
}

// Rank 0 alone reads all of the checkpoints; the others wait until it has renamed those that are skipped.
std::string find_resumed_on_all_ranks(const Flags& flags, bool out_existed, ProcessGroup& processes) {
    WholeCheckpoint found;
    if (processes.rank() == 0) found = find_whole_checkpoint(flags.resume);
    set_aside_skipped(found.skipped, out_existed ? flags.out : "");
    return processes.all_gather(found.path).front();
}

Resumed read_resumed(const std::string& checkpoint) {
    const SavedRun saved = read_saved_run(checkpoint);
    return {.checkpoint = checkpoint,
            .flags_of_checkpoint = saved.flags,
            .state = saved.state,
            .changes = saved.flags.at("changes")};
}

// Error if --steps is not above the steps that were made, in a run that was to make more: it is not complete.
static void require_steps_left_if_unfinished(const Resumed& resumed, const Flags& flags) {
    const int64_t step = resumed.state.step;
    const int64_t steps_of_run = resumed.flags_of_checkpoint.at("steps");
    if (is_complete(resumed, flags) && step < steps_of_run)
        throw Error("--steps ", flags.steps, " is not above step ", step,
                    ", which the run has reached; leave it out to go on to step ", steps_of_run, ".");
}

void take_flags_of_resumed(int64_t ranks, Resumed& resumed, Flags& flags) {
    ordered_json saved = resumed.flags_of_checkpoint;
    const int64_t all = saved.at("accumulate");
    if (all % ranks)
        throw Error("The run has ", with_noun(all, "micro-batch"), " a step, which ",
                    with_noun(ranks, "rank"), " cannot share; use a number of ranks that divides ", all, ".");
    saved["accumulate"] = all / ranks;
    const std::string changes = flags.take_checkpoint(saved);
    // An evaluation takes no steps, and the log is that of the run.
    if (flags.steps == 0 && !flags.given("log")) flags.log = "";
    require_steps_left_if_unfinished(resumed, flags);
    if (flags.steps > 0 && !changes.empty())
        resumed.changes.push_back(sentence_of_change(flags, resumed, changes));
}

bool is_complete(const Resumed& resumed, const Flags& flags) {
    return !flags.plan && flags.steps > 0 && resumed.state.step >= flags.steps;
}

void print_complete(const Resumed& resumed) {
    std::printf("The run is complete: %s is its step %ld. To continue it, give --steps above %ld.\n",
                printable(resumed.checkpoint).c_str(), resumed.state.step, resumed.state.step);
}

std::string model_in(const std::string& folder) {
    const std::string newest = find_checkpoint(folder);
    if (!newest.empty()) return newest;
    std::error_code none;
    if (fs::status(path_in(folder, "config.json"), none).type() == fs::file_type::not_found)
        throw Error(folder, " has no config.json and no complete checkpoint; give the folder of a model, ",
                    "or of a run that has saved a checkpoint.");
    return folder;
}

}  // namespace coat
