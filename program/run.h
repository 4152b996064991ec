// program/run.h - a run of ./train: what it is made of. start.h and resume.h declare the functions that make
// a Run; train.h, train_step.h, validation.h, report.h and checkpoints.h declare what a run does.
//
// Types that other files declare:
//   Flags             flags.h: the values of the command line; a member for each flag
//   ProcessGroup      processes.h: all ranks of the run. all_gather(x) returns the x of every rank
//   RunLog            log.h: the file of --log
//   Corpus, Loader    data/tokens.h: the tokens to train on and those held out; micro-batches of them
//   LoopState         data/checkpoint.h: how many steps were made
//   FileContents      data/tokenizer_files.h: files by their names
//   ordered_json      data/json.h: a value of JSON
// fs:: is std::filesystem (data/files.h).
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../data/checkpoint.h"
#include "../data/tokens.h"
#include "../common/model.h"
#include "flags.h"
#include "log.h"
#include "processes.h"

namespace coat {

// What --resume continues.
struct Resumed {
    std::string checkpoint;                                     // its folder
    ordered_json flags_of_checkpoint = ordered_json::object();  // the flags in this checkpoint
    LoopState state;                                            // how many steps were made
    // A sentence for each --resume that changed flags on which later steps depend:
    // "after step 4: --lr 1e-4 (before: 3e-3)".
    ordered_json changes = ordered_json::array();
};

// A run on this rank. main.cpp makes all of it before training begins.
struct Run {
    // What stays as it is.
    const Flags flags;
    const RunSettings settings;
    ProcessGroup& processes;           // all ranks, even if there is only this one
    const std::string why_no_gpu;      // why this process can use no GPU; empty if it can, or needs none
    const std::string weights_folder;  // has the weights to start or go on with; empty: random weights
    const Resumed resumed;             // empty in a new run
    const Corpus corpus;
    const FileContents other_files;  // of `weights_folder`, for the checkpoints; on rank 0
    const bool out_existed;          // --out existed before this run, and is locked since its start

    // What training changes.
    LoopState state;           // how many steps this run has made
    int skipped_in_a_row = 0;  // the last steps, if they were skipped. (Steps without targets do not count)
    ordered_json flags_to_save = ordered_json::object();  // what this run's checkpoints get
    Model* model = nullptr;  // null until it is made, after the start was printed
    // The data in windows of --seq tokens, made before the model: micro-batches to train on, and single
    // validation windows, in the same order in every run.
    std::optional<Loader> training_loader{}, validation_loader{};
    RunLog log{};                              // of rank 0
    std::vector<int32_t> tokens{}, targets{};  // micro-batches (B, T)
    // The last complete checkpoint, in --out or where save_last() found room; empty: none. note_checkpoint()
    // sets it.
    std::string last_checkpoint{};
    // Whether an early end of the run should save the last step: if it is complete, has not been saved, and
    // is fit to be saved (count_step() in train_step.cpp).
    bool at_savable_step = false;

    int64_t micro_batch_tokens() const { return settings.B * settings.T; }
    int64_t step_tokens() const { return micro_batches_of_step(settings) * micro_batch_tokens(); }
    bool is_rank_0() const { return settings.rank == 0; }

    void write_to_log(const char* kind, const ordered_json& fields) {
        log.write_line(kind, state.step, fields);
    }
};

}  // namespace coat
