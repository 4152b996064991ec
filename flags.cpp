// flags.cpp - the table of flags, and how it parses, checks and prints --help.
#include "flags.h"

#include <cstdlib>

#include "plan.h"

namespace coat {

// An empty default means that the recipe chooses (optimizer), or that there is none (the others).
const std::vector<Flag>& flag_table() {
    constexpr double MOST = 1e15;  // for steps and seeds: a double holds it exactly
    constexpr Value TEXT = Value::Text, COUNT = Value::Count, REAL = Value::Real;
    constexpr Resume IGNORE = Resume::Ignore, DEFAULT = Resume::Default, SAME = Resume::Same;
    static const std::vector<Flag> table = {
        {"device", TEXT, IGNORE, "auto", "auto, cpu or gpu; auto is the GPU if there is one"},
        {"ranks", COUNT, IGNORE, "1",
         "processes to start, one for each GPU; torchrun, mpirun and srun set it themselves",
         1, 1024},
        {"model", TEXT, SAME, "llama-tiny",
         "a named model, or a Hugging Face folder to start from", 0, 0, "llama-30m"},
        {"recipe", TEXT, SAME, "coat", "formats of weights, activations and gradients"},
        {"optimizer", TEXT, SAME, "", "formats of the moments; default: coat with a coat recipe, else fp32"},
        {"attention", TEXT, SAME, "compute", "format of the saved q, k, v and attention output"},
        {"master", TEXT, SAME, "exact", "FP32 master weights, or none (stochastic rounding)"},
        {"gradients", TEXT, SAME, "kept", "kept until the update, or none (update during backward; needs --clip 0)"},
        {"data", TEXT, DEFAULT, "",
         "text files, folders of them, or token files (.bin), with commas; default: headers of C++ and of "
         "CUDA; attention crosses from one text or conversation into the next"},
        {"batch", COUNT, SAME, "16", "sequences per micro-batch", 1, 1 << 20, "32"},
        {"seq", COUNT, SAME, "128", "tokens per sequence", 1, 1 << 24, "1024"},
        {"accumulate", COUNT, SAME, "1", "micro-batches per step, on each rank", 1, 1 << 20},
        {"steps", COUNT, DEFAULT, "250",
         "steps in total; 0 evaluates on up to 20 held-out batches, samples if --prompt is given, and stops",
         0, MOST, "900"},
        {"lr", REAL, SAME, "3e-3", "peak of the learning rate", 0, 10, "1e-3"},
        {"warmup", COUNT, SAME, "100", "steps of linear warm-up", 0, MOST},
        {"schedule", TEXT, SAME, "cosine", "the learning rate after the warm-up"},
        {"weight-decay", REAL, SAME, "0.1", "decoupled weight decay of matrices", 0, 10},
        {"clip", REAL, SAME, "1", "clip gradients to this global norm; 0: do not clip", 0, 1e9},
        {"seed", COUNT, SAME, "1", "seed of initial weights, the order of the data, the samples", 0, MOST},
        {"out", TEXT, IGNORE, "out", "folder for checkpoints; \"\": save none"},
        {"save-every", COUNT, DEFAULT, "0",
         "steps between checkpoints; 0: only at the end, or after Ctrl-C", 0, MOST},
        {"resume", TEXT, IGNORE, "", "a checkpoint, or a folder of them: continue the newest"},
        {"eval-every", COUNT, DEFAULT, "50",
         "steps between validations; 0: only first and last", 0, MOST, "150"},
        {"sample-every", COUNT, DEFAULT, "125",
         "steps between samples of generated text; 0: none", 0, MOST, "300"},
        {"prompt", TEXT, DEFAULT, "\n",
         "the beginning of each sample; with --steps 0 in the tokens of the model folder's tokenizer"},
        {"temperature", REAL, DEFAULT, "0.8", "of the samples; 0: always the most probable token", 0, 100},
        {"log", TEXT, IGNORE, "", "file for a log in JSON lines"},
        {"plan", Value::Optional, IGNORE, "",
         "print formats and memory of the run and stop; full: also the buffers of a GPU"},
        {"help", Value::None, IGNORE, "", "print this and stop"},
    };
    return table;
}

namespace {

// How many letters must be inserted, removed or replaced to make b of a (Levenshtein), to suggest a flag.
// row[j] is the distance of the first i letters of a from the first j of b.
size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) row[j] = j;
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0]++;
        for (size_t j = 1; j <= b.size(); j++) {
            const size_t substituted = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row.back();
}

// The rows of a table whose names are the values of a flag.
template <class Table>
void print_choices(const char* flag, const Table& table) {
    std::printf("\n--%s\n", flag);
    for (const auto& row : table) std::printf("  %-16s %s\n", row.name, row.about);
}

}  // namespace

const Flag& find_flag(const std::string& name) {
    const auto& table = flag_table();
    for (const Flag& flag : table)
        if (name == flag.name) return flag;
    const auto nearer = [&](const Flag& a, const Flag& b) {
        return edit_distance(name, a.name) < edit_distance(name, b.name);
    };
    throw Error("--", escaped(name), " is not a flag; write --",
                std::min_element(table.begin(), table.end(), nearer)->name,
                " if you meant that (./train --help lists all flags).");
}

std::string Flag::limits() const {
    if (!number()) return "a value";
    return concat(value == Value::Count ? "a whole number" : "a number", " from ", int64_t(least), " to ",
                  int64_t(most));
}

double Flag::parse(const std::string& text) const {
    const char* characters = value == Value::Count ? "0123456789" : "0123456789.eE+-";
    const bool digits = !text.empty() && text.find_first_not_of(characters) == std::string::npos;
    char* end = nullptr;
    const double x = std::strtod(text.c_str(), &end);  // an overflow, infinity, is out of range
    if (!digits || *end || !(x >= least && x <= most))
        throw Error("--", name, " ", escaped(text), " is not ", limits(), "; give such a number.");
    return x;
}

// Both "--flag value" and "--flag=value".
void Flags::parse(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        const std::string argument = std::string(argv[i]) == "-h" ? "--help" : argv[i];
        if (argument.compare(0, 2, "--") != 0)
            throw Error("\"", escaped(argument),
                        "\" is not a flag; write --flag value (./train --help lists the flags).");
        const size_t equals = std::min(argument.find('='), argument.size());
        const std::string name = argument.substr(2, equals - 2);
        const Flag& flag = find_flag(name);
        const bool inside = equals < argument.size(), last = i + 1 == argc;
        if (flag.value == Value::None && inside) throw Error("--", name, " takes no value; write it alone.");
        if (flag.setting() && !inside && last)
            throw Error("--", name, " needs ", flag.limits(), " after it.");
        if (!given_.insert(name).second) throw Error("--", name, " is given twice; give it once.");
        std::string& value = values_[name];
        const bool optional = flag.value == Value::Optional;
        if (inside) value = argument.substr(equals + 1);
        else if (flag.setting() || (optional && !last && argv[i + 1][0] != '-')) value = argv[++i];
        if (flag.number()) flag.parse(value);
        if (flag.resume != Resume::Ignore && !is_utf8(value))  // a checkpoint remembers it, in JSON
            throw Error("--", name, " ", escaped(value),
                        " is not UTF-8 text; give another value, or rename the file.");
        if (optional && !value.empty() && value != "full")
            throw Error("--", name, " ", escaped(value), " is not known; write --", name, " or --", name,
                        " full.");
    }
}

// A flag with Resume::Same must be left out, or equal the checkpoint's value. Numbers are compared as
// numbers: 1e-3 is 0.001.
void Flags::take(const nlohmann::json& saved) {
    for (const Flag& flag : flag_table()) {
        if (flag.resume == Resume::Ignore || !saved.contains(flag.name)) continue;
        const std::string theirs = saved[flag.name].get<std::string>();
        const std::string& ours = values_.emplace(flag.name, theirs).first->second;
        const bool equal = flag.number() ? flag.parse(ours) == flag.parse(theirs) : ours == theirs;
        if (flag.resume == Resume::Same && !equal)
            throw Error("--", flag.name, " ", escaped(ours), " differs from the checkpoint's ",
                        escaped(theirs),
                        "; leave it out to continue that run, or leave --resume out to begin another.");
    }
}

void Flags::take_defaults(bool gpu) {
    for (const Flag& flag : flag_table())
        if (flag.setting()) values_.emplace(flag.name, gpu && flag.gpu ? flag.gpu : flag.standard);
}

nlohmann::ordered_json Flags::remembered() const {
    nlohmann::ordered_json json;
    for (const Flag& flag : flag_table())
        if (flag.resume != Resume::Ignore) json[flag.name] = text(flag.name);
    return json;
}

// Flags without a value in the table, such as --plan, are no settings.
nlohmann::ordered_json Flags::typed() const {
    nlohmann::ordered_json json;
    for (const Flag& flag : flag_table()) {
        if (flag.value == Value::Text) json[flag.name] = text(flag.name);
        if (flag.value == Value::Count) json[flag.name] = count(flag.name);
        if (flag.value == Value::Real) json[flag.name] = real(flag.name);
    }
    return json;
}

void print_help() {
    std::printf("./train trains a Llama, Mistral, Qwen2 or GPT-2 model in FP8 with COAT (arXiv 2410.19313). "
                "Without flags it trains\na small model on C++ headers found on this machine. Flags and "
                "their defaults (on a CPU | on a GPU, where they differ):\n\n");
    for (const Flag& flag : flag_table()) {
        const std::string defaults = escaped(flag.standard) + (flag.gpu ? concat(" | ", flag.gpu) : "");
        const char* const kinds[] = {"", "[full]", "TEXT", "N", "X"};
        const std::string name = std::string("--") + flag.name + " " + kinds[int(flag.value)];
        std::printf("  %-19s %-24s %s%s\n", name.c_str(), defaults.c_str(), flag.about,
                    flag.number() ? ("; " + flag.limits()).c_str() : "");
    }
    std::printf("\n--model\n");
    for (const ModelConfig& c : models())
        std::printf("  %-16s %s, %ld layers, hidden size %ld, %ld positions\n", c.name.c_str(), c.arch.name,
                    c.L, c.C, c.max_T);
    print_choices("recipe", recipes());
    print_choices("optimizer", optimizers());
    for (const MemoryMode& mode : memory_modes()) print_choices(mode.flag, mode.choices);
    print_choices("schedule", schedules());
}

}  // namespace coat
