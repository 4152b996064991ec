// run.h - a run of ./train: what it is made of, and the functions that make it, which main.cpp calls.
// train.cpp has the training loop.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../data/checkpoint.h"
#include "../data/files.h"
#include "../data/tokens.h"
#include "../model.h"
#include "flags.h"
#include "log.h"
#include "processes.h"

namespace coat {

// What --resume continues.
struct Resumed {
    std::string checkpoint;          // its folder
    Json settings = Json::object();  // as this checkpoint has them, unchanged
    LoopState state;                 // the steps that were made, without the settings
    // Sentences: which flags that change steps were given with --resume, and after which step.
    Json changes = Json::array();
};

// A run on this rank. main.cpp makes all of it before training begins.
struct Run {
    // What stays as it is.
    const Flags flags;
    const Setup setup;
    ProcessGroup& processes;           // all ranks, also if there is only this one
    const std::string why_no_gpu;      // why this process can use no GPU; empty if it can, or need not
    const std::string weights_folder;  // that the run starts from, or continues; empty: random weights
    const Resumed resumed;             // empty in a new run
    const Corpus corpus;
    const FileContents other_files;  // of `weights_folder`, for the checkpoints
    const bool out_is_locked;        // --out existed before this run, and is locked

    // What training changes.
    LoopState state;         // the steps that this run has made, and the settings for its own checkpoints
    Model* model = nullptr;  // null until it is made, after the start was printed
    RunLog log{};            // of rank 0
    std::vector<int32_t> tokens{}, targets{};  // micro-batches (B, T)
    std::string last_checkpoint{};  // the last complete one in --out; empty: none. Set by note_checkpoint().
    // Whether the model is at the end of a step that may be saved, and that is in no checkpoint yet.
    bool at_savable_step = false;

    int64_t batch_tokens() const { return setup.B * setup.T; }
    int64_t step_tokens() const { return micro_batches_of_step(setup) * batch_tokens(); }
    bool is_rank_0() const { return setup.rank == 0; }

    void write_to_log(const char* kind, const Json& fields) { log.write_line(kind, state.step, fields); }
};

// -----------------------------------------------------------------------------------------------------------
// start.cpp: from the flags to a model. main.cpp calls these functions in this order, on every rank. Some of
// them set flags that were not given: then Flags is not const. A function whose name ends with on_all_ranks
// waits for all ranks, here and in other files: on one rank alone it would never return.

std::vector<std::string> files_of_output();  // that standard output and error go to
// Starts or finds the other ranks. From here on only rank 0 prints.
std::unique_ptr<ProcessGroup> start_ranks(const Launch& launch, const Flags& flags);
// --device auto becomes cpu or gpu. Returns why this process can use no GPU; empty if it can, or need not.
std::string choose_device(const ProcessGroup& processes, Flags& flags);
// A setup that has the ranks alone.
Setup setup_of_ranks(const Launch& launch, ProcessGroup& processes);
// All of the setup but the model, and the length of sequences.
Setup make_setup(const Setup& ranks, bool has_gpu, Flags& flags);
// The folder that the run starts from: the checkpoint that it continues, or --model; empty if --model names a
// row of the table.
std::string find_weights(const Resumed& resumed, Flags& flags);
ModelConfig choose_model(const std::string& weights_folder, const Flags& flags);
// Reads --data; nothing for a plan, which needs no data. `output_files` are not read.
Corpus load_data_on_all_ranks(const Flags& flags, const Resumed& resumed,
                              const std::vector<std::string>& output_files, ProcessGroup& processes);
// Sets setup.T, and the vocabulary size of a model that has none. Error if the model or --seq do not go with
// the data.
void take_sizes_of_data(const Corpus& data, const std::string& weights_folder, Flags& flags, Setup& setup);
// What trainer.json keeps of a run: its flags, what its data are, and how it came about.
Json settings_to_save_on_all_ranks(const Run& run);
void require_same_on_all_ranks(const Run& run);  // Error if ranks differ in a flag, in data or in the model
void require_data_of_resumed(const Run& run);    // Error if the run that is continued had other data
// The tokenizer and other files that checkpoints have besides the model.
FileContents find_other_files(const std::string& weights_folder, const Corpus& corpus);
std::unique_ptr<Model> make_model(const Run& run);
void log_settings(Run& run);

// -----------------------------------------------------------------------------------------------------------
// checkpoints.cpp: --resume, the folder --out, and what is saved there

std::string folder_of_resumed(const Flags& flags);  // the folder with the checkpoints that --resume continues
// Finds what --resume continues, and sets the flags that are not given as they were in that run. Renames
// checkpoints in --out that are not whole, if --out is locked.
Resumed resume_on_all_ranks(const Setup& ranks, ProcessGroup& processes, bool out_is_locked, Flags& flags);
// Whether the run that --resume continues has made all its steps.
bool is_complete(const Resumed& resumed, const Flags& flags);
void print_complete(const Resumed& resumed);
std::string model_in(const std::string& folder);

// Locks --out, and returns whether it exists. If not, Error unless it can be created.
bool lock_output_folder_on_all_ranks(const Flags& flags, ProcessGroup& processes);
// Error if --out has the checkpoints of another run than `resumed`.
void require_own_folder(const Flags& flags, const Resumed& resumed);
void create_and_lock_output_folder(const Run& run);

// Sets run.last_checkpoint. From then on an error is followed by "The last complete checkpoint is ...;
// continue it with --resume".
void note_checkpoint(Run& run, const std::string& checkpoint);
// Saves the model and run.state as a checkpoint in --out, and returns whether that was possible.
bool save(Run& run);
// Saves the last step, in another folder if --out cannot be written. Returns the exit code: 0 if it is in
// --out.
int save_last(Run& run);
// Calls `read`, which reads micro-batches. If it fails on a rank, all ranks save the last step and get an
// Error.
void read_on_all_ranks(Run& run, const std::function<void()>& read);

// -----------------------------------------------------------------------------------------------------------
// report.cpp: what a run prints. Every rank calls these functions, and rank 0 alone prints and logs.

// The floating-point operations of training on one token of a sequence of T. For each weight of a GEMM they
// are 2 in forward and 4 in backward; the head has such a GEMM, and looking up the embedding has none.
// Attention in each layer has 6 T for each element of q: two products with T / 2 keys on average, forward and
// twice backward.
double flops_per_token(const ModelConfig& c, int64_t T);

void print_start(const Run& run);
Setup setup_of_last_rank(const Run& run);
void print_step(Run& run, const StepResult& result, float lr, double took, double left);
void print_end(Run& run, double validation, int64_t steps, double seconds, double timed);
double report_validation(Run& run);
void report_sample(Run& run);
void report_quantization(Run& run);

// -----------------------------------------------------------------------------------------------------------
// evaluate.cpp: what is measured on held-out text. Every rank calls these functions at the same time.

struct Validation {
    double loss;      // in nats: the mean over the targets of the evaluated windows that count
    int64_t targets;  // the number of these targets
};
Validation measure_validation(Run& run);  // Error if no target counts, or if the loss is not finite

struct Sample {
    std::vector<int32_t> tokens;  // empty if no window of the text has room for a continuation
    int64_t prompt;               // how many of them are held-out text; the model has made the rest
};
Sample draw_sample(const Run& run);

// How well FP8 represents each kind of tensor, measured on one micro-batch, forward and backward. After a run
// also the moments that its gradients would lead to, and the expansion factors k in use, on all ranks.
QuantReport measure_quantization(Run& run);

// -----------------------------------------------------------------------------------------------------------
// train.cpp and generate.cpp

// The steps of warm-up that a run makes. A warm-up that is longer than the run would end below the peak; it
// is shortened to a tenth of the run.
int64_t warmup_steps(int64_t warmup, int64_t steps);
// The learning rate of one step, counted from 0: linear warm-up to the peak, then half a cosine to a tenth of
// it.
float learning_rate(double peak, int64_t warmup, int64_t steps, int64_t step);
int train(Run& run);  // returns the exit code

void answer_prompt(const Setup& ranks, const Flags& flags, ProcessGroup& processes);

}  // namespace coat
