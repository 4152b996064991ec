// run.h - a run of ./train: what it is made of, and the stages that complete it, in their order. main.cpp
// calls them; train.cpp has the training loop.
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

struct Run {
    Flags flags;
    Setup setup{};
    std::unique_ptr<ProcessGroup> processes;  // all ranks, also if there is only this one
    // Why this process has no GPU; empty if it has one, or if --device cpu asks for none.
    std::string why_no_gpu;
    std::vector<std::string> output_files;  // that standard output and error go to
    std::string weights_folder;  // the folder that the run starts from, or continues; empty: random weights
    // The settings in the checkpoint that --resume continues, unchanged.
    Json resumed = Json::object();
    LoopState state;  // the steps that this run has made, and the settings for its own checkpoints
    // Sentences: which flags that change steps were given with --resume, and after which step.
    Json changes = Json::array();
    FileContents other_files;  // of `weights_folder`, for the checkpoints
    Corpus corpus;
    std::unique_ptr<Model> model;
    RunLog log;                            // of rank 0
    std::vector<int32_t> tokens, targets;  // micro-batches (B, T)
    bool out_is_locked = false;            // --out existed before this run, and is locked
    std::string last_checkpoint;  // the last complete one in --out; empty: none. Set by note_checkpoint().
    // Whether the model is at the end of a step that may be saved, and that is in no checkpoint yet.
    bool at_savable_step = false;

    int64_t batch_tokens() const { return setup.B * setup.T; }
    int64_t step_tokens() const { return micro_batches_of_step(setup) * batch_tokens(); }
    bool on_gpu() const { return flags.device == "gpu"; }  // also if this is a plan, and there is no GPU
    bool resumes() const { return flags.given("resume"); }
    bool is_rank_0() const { return setup.rank == 0; }
    bool saves_checkpoints() const { return !flags.out.empty() && !flags.plan && flags.steps > 0; }

    void write_to_log(const char* kind, const Json& fields) { log.write_line(kind, state.step, fields); }
};

// -----------------------------------------------------------------------------------------------------------
// start.cpp: from the flags to a model, in this order. Every rank calls each of these stages. A function
// whose name ends with on_all_ranks waits for all ranks, here and in other files: on one rank alone it would
// never return.

void start_ranks(Run& run);         // starts or finds the other processes; from here on only rank 0 prints
void choose_device(Run& run);       // --device auto becomes cpu or gpu
void make_setup(Run& run);          // fills run.setup, but for the model and the length of sequences
void choose_model(Run& run);        // fills run.setup.config, and run.weights_folder if --model is a folder
void load_data(Run& run);           // fills run.corpus; a plan needs no data
void take_sizes_of_data(Run& run);  // fills run.setup.T, and the vocabulary size of a model without one
Json settings_to_save_on_all_ranks(const Run& run);  // what trainer.json keeps of a run
void require_same_on_all_ranks(const Run& run);  // Error if ranks differ in a flag, in data or in the model
void require_data_of_resumed(const Run& run);    // Error if the run that is continued had other data
void take_other_files(Run& run);                 // fills run.other_files
void make_model(Run& run);                       // fills run.model
void log_settings(Run& run);

// -----------------------------------------------------------------------------------------------------------
// checkpoints.cpp: --resume, the folder --out, and what is saved there

// Fills run.weights_folder, run.resumed, run.state, run.changes and the flags that are not given. Locks
// --out, and renames checkpoints in it that are not whole.
void resume(Run& run);
bool is_complete(const Run& run);  // whether the run that --resume continues has made all its steps
void print_complete(const Run& run);
std::string model_in(const std::string& folder);

void lock_output_folder(Run& run);        // if --out exists; if not, Error unless it can be created
void require_own_folder(const Run& run);  // Error if --out has another run's checkpoints
void create_and_lock_output_folder(const Run& run);

// Sets run.last_checkpoint, and the advice that follows an error.
void note_checkpoint(Run& run, const std::string& checkpoint);
bool save(Run& run);
int save_last(Run& run);  // the exit code: 0 if the checkpoint is in --out
void read_or_save_and_fail(Run& run, const std::function<void()>& read);

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

void answer_prompt(const Run& run);

}  // namespace coat
