// program/flags.h - the command line of ./train. The values are members of Flags. The table in flags.cpp has
// a row for each flag; how it is read, its line of --help, and whether a checkpoint keeps it follow from its
// row.
#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "../data/json.h"

namespace coat {

inline constexpr const char* VERSION = "1.0";

// The learning rate without --lr: of weights from a folder, and of new weights, by the number of parameters.
inline constexpr double FINE_TUNING_RATE = 1e-5;
double default_learning_rate(int64_t parameters);
// The steps of warm-up without --warmup: 100, or in a run of fewer than 250 steps a tenth of them.
int64_t default_warmup(int64_t steps);

// The value of a flag is the one on the command line; else the one in the checkpoint that the run continues;
// else the default of the table for a GPU; else the default below.
struct Flags {
    // What is trained, and where.
    std::string device = "auto";
    int64_t ranks = 1;
    std::string model = "llama-tiny";
    std::string recipe = "coat";
    std::string optimizer;  // empty: that of the recipe
    std::string attention = "unquantized";
    std::string master = "exact";
    std::string gradients = "kept";
    // The steps.
    std::string data = "/usr/include/c++";
    std::string val;  // empty: a part of the data is held out
    int64_t batch = 16;
    int64_t seq = 128;
    int64_t accumulate = 1;
    int64_t steps = 250;
    double lr = 0;       // start.cpp chooses the default, by the model
    int64_t warmup = 0;  // start.cpp chooses the default, by the steps
    double beta1 = 0.9;
    double beta2 = 0.95;
    double weight_decay = 0.1;
    double clip = 1;
    int64_t seed = 1;
    // What is saved.
    std::string out = "out";
    int64_t save_every = 0;
    int64_t keep = 2;
    std::string resume;
    // What is measured and written.
    int64_t eval_every = 50;
    int64_t eval_tokens = 1 << 15;
    int64_t sample_every = 125;
    double temperature = 0.8;
    std::string log;
    // Instead of training.
    std::string prompt;
    int64_t new_tokens = 256;
    bool plan = false;
    bool help = false;
    bool version = false;

    // Reads the command line, up to --help or --version. Error if a flag is unknown or its value is not
    // allowed.
    void parse(const std::vector<std::string>& arguments);
    // Whether the flag of this name is on the command line.
    bool given(const std::string& name) const { return given_.count(name) > 0; }

    bool resumes() const { return given("resume"); }
    bool on_gpu() const { return device == "gpu"; }  // even if this is a plan, and there is no GPU
    bool saves_checkpoints() const { return !out.empty() && !plan && steps > 0; }

    // Sets flags that are not given, of those that have a default of their own for a GPU.
    void take_gpu_defaults();
    // Sets each flag that is not given to its value in a checkpoint. Error if a flag that is given would make
    // the run another one. Returns what the given flags change in the steps to come, as a text:
    // "--steps 500 (before: 250), --clip 0.5 (before: 1.0)".
    std::string take_checkpoint(const ordered_json& saved);

    // The values by the names of the flags: of all flags but switches, and of the flags that a checkpoint
    // keeps.
    ordered_json all_as_json() const;
    ordered_json saved_as_json() const;

private:
    std::set<std::string> given_;  // the names of the flags on the command line
};

void print_version();
void print_help();

}  // namespace coat
