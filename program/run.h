// run.h - a run of ./train: what it is made of, how it trains (train.cpp), and what it measures, prints and
// saves. start.h declares the functions that make a Run.
//
// Types that other files declare:
//   Flags             flags.h: the values of the command line; a member for each flag
//   ProcessGroup      processes.h: all ranks of the run. all_gather(x) returns the x of every rank
//   RunLog            log.h: the file of --log
//   Corpus, Loader    data/tokens.h: the tokens to train on and those held out; micro-batches of them
//   LoopState         data/checkpoint.h: how many steps were made
//   FileContents      data/model_folder.h: files by their names
//   ordered_json      data/json.h: a value of JSON
// fs:: is std::filesystem (data/files.h).
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../data/checkpoint.h"
#include "../data/tokens.h"
#include "../model.h"
#include "flags.h"
#include "log.h"
#include "processes.h"

namespace coat {

// What --resume continues.
struct Resumed {
    std::string checkpoint;                             // its folder
    ordered_json saved_flags = ordered_json::object();  // as this checkpoint has them, unchanged
    LoopState state;                                    // how many steps were made
    // A sentence for each --resume that changed flags of the steps: "after step 4: --lr 1e-4 (before: 3e-3)".
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
    LoopState state;                                    // how many steps this run has made
    ordered_json saved_flags = ordered_json::object();  // for its own checkpoints
    Model* model = nullptr;                             // null until it is made, after the start was printed
    // The data in windows of --seq tokens, made before the model: micro-batches to train on, and single
    // validation windows, in the same order in every run.
    std::optional<Loader> training_loader{}, validation_loader{};
    RunLog log{};                              // of rank 0
    std::vector<int32_t> tokens{}, targets{};  // micro-batches (B, T)
    // The last complete checkpoint, in --out or where save_last() found room; empty: none. note_checkpoint()
    // sets it.
    std::string last_checkpoint{};
    // Whether the last step is complete, may be saved, and has not been saved.
    bool at_savable_step = false;

    int64_t micro_batch_tokens() const { return settings.B * settings.T; }
    int64_t step_tokens() const { return micro_batches_of_step(settings) * micro_batch_tokens(); }
    bool is_rank_0() const { return settings.rank == 0; }

    void write_to_log(const char* kind, const ordered_json& fields) {
        log.write_line(kind, state.step, fields);
    }
};

// -----------------------------------------------------------------------------------------------------------
// report.cpp: what a run prints. Every rank calls these functions, and rank 0 alone prints and logs.

// Prints what is good to know before the first step: the model and its formats, the data, and the memory that
// the run takes.
void print_start(const Run& run);
// The settings of the last rank. By the formula of owned() in ranks.h this rank owns most of each matrix: of
// a matrix that is a single shard unit, it owns all. So its memory is what is printed.
RunSettings settings_of_last_rank(const Run& run);

// Prints and logs a step, which took `seconds`. The rest of the run will take `seconds_left`, with
// validations, samples and saves. Tokens and floating-point operations a second are those of all ranks.
void print_step(Run& run, const StepResult& result, float lr, double seconds, double seconds_left);
// The floating-point operations of training on one token of a sequence of T:
//   for each weight of a GEMM   2 in forward, 4 in backward. The head counts, the look-up of the embedding
//                               does not
//   for each element of q       6 T: two products with T / 2 keys on average, at 2 operations each. Backward
//                               does twice the operations of forward
double flops_per_token(const ModelConfig& config, int64_t T);

// The steps that were made since this program was started, and the seconds that they took.
struct StepTimes {
    int64_t steps;
    double seconds;       // all that passed, with validations, samples and saves
    double step_seconds;  // of all steps but the first, without validations, samples and saves
};
// Prints and logs the end of a run: the last validation loss, and how fast the steps were.
void print_end(Run& run, double validation, const StepTimes& times);

// The following measure something on validation text (validation.cpp) and print it. The first two also log
// it.
double validate_and_report(Run& run);  // the validation loss, which is returned
void report_sample(Run& run);          // a beginning of validation text, and how the model continues it
void report_quantization(Run& run);    // how well FP8 represents each kind of tensor

// -----------------------------------------------------------------------------------------------------------
// validation.cpp: what is measured on validation text. Every rank calls these functions at the same time.

struct Validation {
    double loss;      // in nats: the mean over the targets that count, of the evaluated windows
    int64_t targets;  // the number of targets that count
};
Validation measure_validation(Run& run);  // Error if no target counts, or if the loss is not finite

struct Sample {
    std::vector<int32_t> tokens;  // empty if no window of the text has room for a continuation
    int64_t prompt;  // the first `prompt` tokens are validation text; the model has made the rest
};
Sample draw_sample(const Run& run);

// How well FP8 represents each kind of tensor, measured on one micro-batch, forward and backward. If the run
// has made a step, also the moments that the gradients of this micro-batch would lead to, and the expansion
// exponents k in use, on all ranks.
QuantReport measure_quantization(Run& run);

// -----------------------------------------------------------------------------------------------------------
// train.cpp

// The steps of warm-up that a run makes. With a warm-up that is longer than the run, the learning rate would
// never reach the peak. So such a warm-up is shortened to a tenth of the run: 100 of 100 steps stay 100, and
// 101 of 100 steps become 10.
int64_t warmup_steps(int64_t warmup, int64_t steps);
// The learning rate of one step, counted from 0: linear warm-up to the peak, then half a cosine to a tenth of
// the peak. If fewer than two steps follow the warm-up, the run ends at the peak.
float learning_rate(double peak, int64_t warmup, int64_t steps, int64_t step);
// Trains until --steps, or until a signal comes. Returns the exit code.
int train(Run& run);

}  // namespace coat
