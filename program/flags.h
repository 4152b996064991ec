// flags.h - the command line of ./train: one table of flags that parses, checks and prints --help.
#pragma once
#include <charconv>
#include <set>
#include <variant>
#include <nlohmann/json.hpp>

#include "plan.h"

namespace coat {

using Json = nlohmann::ordered_json;

// Values are those of the command line, else of the checkpoint that a run continues, else these.
struct Flags {
    std::string device = "auto", model = "llama-tiny", recipe = "coat", optimizer, attention = "compute",
                master = "exact", gradients = "kept", data = "/usr/include/c++", out = "out", resume, log;
    int64_t ranks = 1, batch = 16, seq = 128, accumulate = 1, steps = 250, warmup = 100, seed = 1,
            save_every = 0, keep = 2, eval_every = 50, eval_tokens = 1 << 15, sample_every = 125;
    double lr = 3e-3, weight_decay = 0.1, clip = 1;
    bool plan = false, help = false;

    void parse(int argc, char** argv);
    // Takes what is not given from a checkpoint. Error if a flag is given that would make it another run.
    // Returns what the flags that are given change of the steps to come.
    std::string take(const Json& saved);
    void take_gpu_defaults();                                                     // where nothing is given
    bool given(const std::string& name) const { return given_.count(name) > 0; }  // on the command line

    // By name, without those that only print; also those of this machine, which no checkpoint has.
    Json settings(bool of_this_machine) const;

private:
    std::set<std::string> given_;
};

// What --resume does with a flag. HERE: no checkpoint has it. FREE: another may be given. FUTURE: also, but
// checkpoints say so. SAME: another is an error, because it would change what the state means.
enum Resume : uint8_t { HERE, FREE, FUTURE, SAME };

struct Flag {
    const char* name;
    std::variant<std::string Flags::*, int64_t Flags::*, double Flags::*, bool Flags::*> member;
    Resume resume;
    const char* about;          // a line for --help
    const char* words = "";     // the texts that it may have; "": any
    const char* gpu = nullptr;  // the default on a GPU, if it is another
    int64_t least = 0;          // of a number
};

// clang-format off
inline const Flag TABLE[] = {
    {"device", &Flags::device, HERE, "auto, cpu or gpu; auto is the GPU if there is one", "auto cpu gpu"},
    {"ranks", &Flags::ranks, HERE, "processes, one for each GPU; torchrun sets it itself", "", nullptr, 1},
    {"model", &Flags::model, SAME, "a named model, or a Hugging Face folder to start from", "", "llama-30m"},
    {"recipe", &Flags::recipe, SAME, "formats of weights, activations and gradients"},
    {"optimizer", &Flags::optimizer, SAME, "formats of the moments; default: the recipe's"},
    {"attention", &Flags::attention, SAME, "saved q, k, v and attention output; groups: in FP8",
     "compute groups"},
    {"master", &Flags::master, SAME, "FP32 master weights; none: rounded stochastically", "exact none"},
    {"gradients", &Flags::gradients, SAME, "until the update; none: update in backward", "kept none"},
    {"data", &Flags::data, FREE, "text, folders of it, token files (.bin), by commas"},
    {"batch", &Flags::batch, SAME, "sequences per micro-batch", "", "32", 1},
    {"seq", &Flags::seq, SAME, "tokens per sequence", "", "1024", 1},
    {"accumulate", &Flags::accumulate, SAME, "micro-batches per step, on each rank", "", nullptr, 1},
    {"steps", &Flags::steps, FUTURE, "steps in total; 0 evaluates on held-out text and stops", "", "900"},
    {"lr", &Flags::lr, FUTURE, "peak of the learning rate, which falls to a tenth", "", "1e-3"},
    {"warmup", &Flags::warmup, FUTURE, "steps of linear warm-up, before half a cosine"},
    {"weight-decay", &Flags::weight_decay, FUTURE, "decoupled weight decay of matrices"},
    {"clip", &Flags::clip, FUTURE, "clip gradients to this global norm; 0: do not clip"},
    {"seed", &Flags::seed, SAME, "of first weights, the order of the data, the samples"},
    {"out", &Flags::out, HERE, "folder for checkpoints; \"\": save none"},
    {"save-every", &Flags::save_every, FREE, "steps between checkpoints; 0: about half an hour"},
    {"keep", &Flags::keep, FREE, "newest checkpoints that stay in --out", "", nullptr, 1},
    {"resume", &Flags::resume, HERE, "continue this checkpoint, or the newest in a folder"},
    {"eval-every", &Flags::eval_every, FREE, "steps between validations; 0: first and last", "", "150"},
    {"eval-tokens", &Flags::eval_tokens, FREE, "held-out tokens of a validation", "", "131072", 1},
    {"sample-every", &Flags::sample_every, FREE, "steps between samples of text; 0: none", "", "300"},
    {"log", &Flags::log, HERE, "file for a log in JSON lines"},
    {"plan", &Flags::plan, HERE, "print formats and memory of the run, and stop"},
};
// clang-format on

inline bool is_switch(const Flag& flag) { return std::holds_alternative<bool Flags::*>(flag.member); }

inline Json value(const Flags& flags, const Flag& flag) {
    return std::visit([&](auto member) { return Json(flags.*member); }, flag.member);
}
inline std::string text_of(const Json& x) { return x.is_string() ? x.get<std::string>() : x.dump(); }

// Whole numbers have at most 31 bits, so that batch x seq cannot overflow.
inline void set(Flags& flags, const Flag& flag, const std::string& text) {
    auto parse = [&](auto member) {
        using T = std::decay_t<decltype(flags.*member)>;
        if constexpr (std::is_same_v<T, std::string>) {
            if (*flag.words && !is_one_of(flag.words, text))
                throw Error("--", flag.name, " ", text, " is not one of: ", flag.words, ".");
            flags.*member = text;
        } else if constexpr (std::is_same_v<T, bool>) {
            flags.*member = true;
        } else {
            T x{};
            const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
            const bool whole = std::is_same_v<T, int64_t>, number = error == std::errc();
            if (!number || *end || !(x >= flag.least && x <= INT32_MAX))
                throw Error("--", flag.name, " ", text, " is not ", whole ? "a whole number" : "a number",
                            " from ", flag.least, " to ", INT32_MAX, "; give such a number.");
            flags.*member = x;
        }
    };
    std::visit(parse, flag.member);
}

inline void Flags::parse(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument == "--help") return void(help = true);
        const auto is_named = [&](const Flag& f) { return argument == std::string("--") + f.name; };
        const Flag* const flag = std::find_if(std::begin(TABLE), std::end(TABLE), is_named);
        if (flag == std::end(TABLE))
            throw Error("\"", argument, "\" is not a flag; write --flag value (./train --help lists them).");
        if (!is_switch(*flag) && i + 1 == argc) throw Error(argument, " needs a value after it.");
        set(*this, *flag, is_switch(*flag) ? "" : argv[++i]);
        given_.insert(flag->name);
    }
}

inline std::string Flags::take(const Json& saved) {
    std::string changes;
    for (const Flag& flag : TABLE) {
        if (flag.resume == HERE) continue;
        const Json ours = value(*this, flag), theirs = saved.value(flag.name, ours);
        if (!given(flag.name)) set(*this, flag, text_of(theirs));
        else if (flag.resume == SAME && ours != theirs)
            throw Error("--", flag.name, " ", ours.dump(), " differs from the checkpoint's ", theirs.dump(),
                        "; leave it out to continue that run, or leave --resume out to begin another.");
        else if (flag.resume == FUTURE && ours != theirs)
            changes += concat(" --", flag.name, " ", ours.dump(), " in place of ", theirs.dump());
    }
    return changes;
}

inline void Flags::take_gpu_defaults() {
    for (const Flag& flag : TABLE)
        if (flag.gpu && !given(flag.name)) set(*this, flag, flag.gpu);
}

inline Json Flags::settings(bool of_this_machine) const {
    Json all;
    for (const Flag& flag : TABLE)
        if (!is_switch(flag) && (of_this_machine || flag.resume != HERE)) all[flag.name] = value(*this, flag);
    return all;
}

inline void print_help() {
    std::printf(
        "./train trains a Llama, Mistral, Qwen or GPT-2 model in FP8 with COAT (arXiv 2410.19313).\n"
        "Without flags it trains a small model on C++ headers found on this machine. --help prints\n"
        "this. Flags and their defaults (on a CPU | on a GPU, where they differ):\n\n");
    const Flags standard;
    for (const Flag& flag : TABLE) {
        std::string text = is_switch(flag) ? "" : text_of(value(standard, flag));
        if (flag.gpu) text += concat(" | ", flag.gpu);
        std::printf("  --%-12s %-22s %s\n", flag.name, text.c_str(), flag.about);
    }
    std::printf("\n--model\n");
    for (const ModelConfig& c : models())
        std::printf("  %-16s %s, %ld layers, hidden size %ld, %ld positions\n", c.name.c_str(), c.arch.name,
                    c.L, c.C, c.max_T);
    std::printf("\n--recipe\n");
    for (const Recipe& r : recipes()) std::printf("  %-12s %s\n", r.name, r.about);
    std::printf("\n--optimizer\n");
    for (const OptimizerFormat& o : optimizers()) std::printf("  %-12s %s\n", o.name, o.about);
}

}  // namespace coat
