// flags.h - the command line of ./train: one table of flags that parses, checks and prints --help
// (flags.cpp).
#pragma once
#include <set>
#include <string>
#include <nlohmann/json.hpp>

namespace coat {

// Values are those of the command line, else of the checkpoint that a run continues, else these.
struct Flags {
    std::string device = "auto", model = "llama-tiny", recipe = "coat", optimizer, attention = "compute",
                master = "exact", gradients = "kept", data = "/usr/include/c++", out = "out", resume, log;
    int64_t ranks = 1, batch = 16, seq = 128, accumulate = 1, steps = 250, warmup = 100, seed = 1,
            save_every = 0, keep = 2, eval_every = 50, sample_every = 125;
    double lr = 3e-3, weight_decay = 0.1, clip = 1;
    bool plan = false, help = false;

    void parse(int argc, char** argv);
    // Takes what is not given from a checkpoint. Error if a flag is given that would make it another run.
    // Returns what the flags that are given change of the steps to come.
    std::string take(const nlohmann::ordered_json& saved);
    void take_gpu_defaults();                                                     // where nothing is given
    bool given(const std::string& name) const { return given_.count(name) > 0; }  // on the command line

    // By name, without those that only print; also those of this machine, which no checkpoint has.
    nlohmann::ordered_json settings(bool of_this_machine) const;

private:
    std::set<std::string> given_;
};

void print_help();

}  // namespace coat
