// train.cpp - the program: flags in, a trained model out. It knows the models through coat.h's Model, files through data/, and
// nothing of either's inside: no CUDA and no file format is here.
//
// In order: the table of flags, what the flags make of a run, generated text, the log, and the loop.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <new>
#include <random>

#include "coat.h"
#include "data/checkpoint.h"
#include "data/file.h"
#include "data/json.h"
#include "data/tokens.h"
#include "plan.h"

#ifndef COAT_CUDA  // built without nvcc: this is all there is of the GPU
namespace coat {
std::string why_no_gpu() { return "this program was built without CUDA: install the CUDA toolkit (nvcc) and run make again"; }
std::unique_ptr<Model> make_gpu(const Setup&) { throw Error(why_no_gpu() + "."); }
}  // namespace coat
#endif

namespace {

using namespace coat;
namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// ---------------------------------------------------------------------------------------------------------------------
// Flags: one table that parses, checks and prints --help

enum class Value : uint8_t { None, Text, Count, Real };
enum class Resume : uint8_t { Free, Kept, Same };  // on --resume: as now; as the checkpoint's unless given; never another

struct Flag {
    const char* name;
    Value value;
    const char *cpu, *gpu;  // defaults by device
    double least, most;
    Resume resume;
    const char* about;
};

constexpr double MOST = 1e15;  // no number of steps or a seed is larger; a double holds it exactly
const Flag FLAGS[] = {
    {"device", Value::Text, "auto", "auto", 0, 0, Resume::Free, "auto, cpu or gpu; auto is the GPU if there is one"},
    {"model", Value::Text, "llama-tiny", "llama-30m", 0, 0, Resume::Same, "a named model, or a Hugging Face folder to start from"},
    {"recipe", Value::Text, "coat", "coat", 0, 0, Resume::Same, "formats of weights, activations and gradients"},
    {"optimizer", Value::Text, "", "", 0, 0, Resume::Same, "formats of the moments; default coat with recipe coat, else fp32"},
    {"m-format", Value::Text, "", "", 0, 0, Resume::Same, "format of the first moment, if not --optimizer's: e4m3, e5m2, fp16, bf16, fp32"},
    {"v-format", Value::Text, "", "", 0, 0, Resume::Same, "format of the second moment, likewise"},
    {"attention", Value::Text, "stream", "stream", 0, 0, Resume::Same, "format of q, k, v and the output: stream, or groups (FP8)"},
    {"master", Value::Text, "exact", "exact", 0, 0, Resume::Same, "FP32 master weights: exact, or none (stochastic rounding)"},
    {"gradients", Value::Text, "kept", "kept", 0, 0, Resume::Same, "kept until the update, or none: updated in the backward pass"},
    {"recompute", Value::Text, "on", "on", 0, 0, Resume::Kept, "outputs of norms and activations in the backward pass: on or off"},
    {"accumulation", Value::Text, "", "", 0, 0, Resume::Same, "how a GPU's FP8 products add up, if not as the recipe says: forward, exact, fast"},
    {"data", Value::Text, "", "", 0, 0, Resume::Kept, "text files, folders of them, or token files (.bin), by commas; default: C++ headers"},
    {"batch", Value::Count, "16", "32", 1, 1 << 20, Resume::Same, "sequences in a micro-batch"},
    {"seq", Value::Count, "128", "1024", 1, 1 << 24, Resume::Same, "tokens in a sequence"},
    {"accumulate", Value::Count, "1", "1", 1, 1 << 20, Resume::Same, "micro-batches in a step"},
    {"steps", Value::Count, "250", "900", 0, MOST, Resume::Kept, "steps in all; 0 evaluates the model and stops"},
    {"lr", Value::Real, "3e-3", "1e-3", 0, 10, Resume::Same, "peak of the learning rate"},
    {"warmup", Value::Count, "100", "100", 0, MOST, Resume::Same, "steps of linear warm-up"},
    {"schedule", Value::Text, "cosine", "cosine", 0, 0, Resume::Same, "what the learning rate does after the warm-up"},
    {"weight-decay", Value::Real, "0.1", "0.1", 0, 10, Resume::Same, "decoupled, on matrices only"},
    {"clip", Value::Real, "1", "1", 0, 1e9, Resume::Same, "largest global norm of the gradient; 0: no clipping"},
    {"seed", Value::Count, "1", "1", 0, MOST, Resume::Same, "of the first weights, the order of the data, and the samples"},
    {"out", Value::Text, "out", "out", 0, 0, Resume::Free, "folder of the checkpoints; \"\": none is saved"},
    {"save-every", Value::Count, "0", "0", 0, MOST, Resume::Kept, "steps; 0: only at the end"},
    {"resume", Value::Text, "", "", 0, 0, Resume::Free, "a checkpoint, or a folder of them: go on from the newest"},
    {"eval-every", Value::Count, "50", "150", 0, MOST, Resume::Kept, "steps between validations; 0: only first and last"},
    {"sample-every", Value::Count, "125", "300", 0, MOST, Resume::Kept, "steps between samples of generated text; 0: never"},
    {"prompt", Value::Text, "\n", "\n", 0, 0, Resume::Kept, "what samples begin with"},
    {"log", Value::Text, "", "", 0, 0, Resume::Free, "file to write JSON lines to"},
    {"plan", Value::None, "", "", 0, 0, Resume::Free, "print precision and memory of the run, and stop"},
    {"help", Value::None, "", "", 0, 0, Resume::Free, "print this, and stop"},
};

const Flag* find_flag(const std::string& name) {
    for (const Flag& flag : FLAGS)
        if (name == flag.name) return &flag;
    return nullptr;
}

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

std::string nearest_flag(const std::string& name) {
    return std::min_element(std::begin(FLAGS), std::end(FLAGS), [&](const Flag& a, const Flag& b) {
        return edit_distance(name, a.name) < edit_distance(name, b.name);
    })->name;
}

std::string number(double x) {  // as short as it can be told
    char text[32];
    std::snprintf(text, sizeof text, "%.10g", x);
    return text;
}

std::string limits(const Flag& flag) {
    if (flag.value == Value::Text) return "a value";
    const std::string kind = flag.value == Value::Count ? "a whole number" : "a number";
    return kind + (flag.most < MOST ? " from " + number(flag.least) + " to " + number(flag.most) : " of at least " + number(flag.least));
}

// The number in text, or an error that names the flag. NaN fails both comparisons; what overflows is out of every range.
double checked(const Flag& flag, const std::string& text) {
    const bool digits = !text.empty() && text.find_first_not_of(flag.value == Value::Count ? "0123456789" : "0123456789.eE+-") == std::string::npos;
    char* end = nullptr;
    const double x = digits ? std::strtod(text.c_str(), &end) : NAN;
    if (!digits || *end || !(x >= flag.least && x <= flag.most))
        throw Error("--" + std::string(flag.name) + " " + escaped(text) + " is not " + limits(flag) + "; choose such a one.");
    return x;
}

// The values of all flags: given on the command line, else the checkpoint's, else the device's default.
class Flags {
public:
    void parse(int argc, char** argv) {
        for (int i = 1; i < argc; i++) {
            std::string argument = argv[i];
            if (argument == "-h") argument = "--help";
            if (argument.compare(0, 2, "--") != 0)
                throw Error("\"" + escaped(argument) + "\" is not a flag: write --flag value; ./train --help lists the flags.");
            const size_t equals = argument.find('=');
            const std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
            const Flag* flag = find_flag(name);
            if (!flag)
                throw Error("--" + escaped(name) + " is not a flag: write --" + nearest_flag(name) + " if you meant that; ./train --help lists all.");
            if (flag->value == Value::None && equals != std::string::npos)
                throw Error("--" + name + " takes no value; write it alone.");
            const bool separate = flag->value != Value::None && equals == std::string::npos;
            if (separate && i + 1 == argc) throw Error("--" + name + " needs a value after it: " + limits(*flag) + ".");
            if (given(name)) throw Error("--" + name + " is given twice; give it once.");
            values_[name] = separate ? argv[++i] : equals == std::string::npos ? "" : argument.substr(equals + 1);
            if (flag->value == Value::Count || flag->value == Value::Real) checked(*flag, values_[name]);
            if (flag->resume != Resume::Free && !is_utf8(values_[name]))  // a checkpoint remembers it, in JSON
                throw Error("--" + name + " " + escaped(values_[name]) + " is not UTF-8 text; give another value, or another name to the file.");
        }
    }

    // What a checkpoint's run was: fills in what is not given, and refuses what would make another run of it.
    void take(const nlohmann::json& saved) {
        for (const Flag& flag : FLAGS) {
            if (flag.resume == Resume::Free || !saved.contains(flag.name)) continue;
            const std::string was = saved[flag.name].get<std::string>();
            if (flag.resume == Resume::Same && given(flag.name) && !same(flag, was))
                throw Error("--" + std::string(flag.name) + " " + escaped(text(flag.name)) + " differs from the checkpoint's " + escaped(was) +
                            ": leave it out to go on with that run, or leave --resume out to begin another.");
            values_.emplace(flag.name, was);
        }
    }

    void take_defaults(bool gpu) {
        for (const Flag& flag : FLAGS)
            if (flag.value != Value::None) values_.emplace(flag.name, gpu ? flag.gpu : flag.cpu);
    }
    void set(const std::string& name, const std::string& value) { values_[name] = value; }

    bool given(const std::string& name) const { return values_.count(name) > 0; }
    const std::string& text(const std::string& name) const { return values_.at(name); }
    int64_t count(const std::string& name) const { return static_cast<int64_t>(real(name)); }
    double real(const std::string& name) const { return checked(*find_flag(name), values_.at(name)); }

    Json remembered() const {  // what a checkpoint keeps: as text, so that it comes back as it was given
        Json json;
        for (const Flag& flag : FLAGS)
            if (flag.resume != Resume::Free) json[flag.name] = text(flag.name);
        return json;
    }
    Json typed() const {  // for the log
        Json json;
        for (const Flag& flag : FLAGS) {
            if (flag.value == Value::Text) json[flag.name] = text(flag.name);
            if (flag.value == Value::Count) json[flag.name] = count(flag.name);
            if (flag.value == Value::Real) json[flag.name] = real(flag.name);
        }
        return json;
    }

private:
    bool same(const Flag& flag, const std::string& was) const {
        return flag.value == Value::Text ? text(flag.name) == was : real(flag.name) == checked(flag, was);
    }
    std::map<std::string, std::string> values_;
};

template <class Table>
void print_choices(const char* flag, const Table& table) {
    std::printf("\n--%s\n", flag);
    for (const auto& row : table) std::printf("  %-16s %s\n", row.name, row.about);
}

void print_help() {
    std::printf("./train trains a Llama or GPT-2 in FP8 with COAT (arXiv 2410.19313). Without a flag it trains a small model on text of\n"
                "this machine and shows how it learns. Flags, with their defaults (on a CPU | on a GPU where that differs):\n\n");
    for (const Flag& flag : FLAGS) {
        const std::string cpu = escaped(flag.cpu), gpu = escaped(flag.gpu), defaults = cpu == gpu ? cpu : cpu + " | " + gpu;
        const char* kind = flag.value == Value::None ? "" : flag.value == Value::Text ? "TEXT" : flag.value == Value::Count ? "N" : "X";
        const std::string name = std::string("--") + flag.name + " " + kind;
        const bool limited = flag.value == Value::Count || flag.value == Value::Real;
        std::printf("  %-19s %-24s %s%s\n", name.c_str(), defaults.c_str(), flag.about, limited ? ("; " + limits(flag)).c_str() : "");
    }
    std::printf("\n--model\n");
    for (const ModelConfig& c : models())
        std::printf("  %-16s %s, %lld layers, hidden size %lld, %lld positions\n", c.name.c_str(), c.arch.name, static_cast<long long>(c.L),
                    static_cast<long long>(c.C), static_cast<long long>(c.max_T));
    print_choices("recipe", recipes());
    print_choices("optimizer", optimizers());
    for (const MemoryMode& mode : memory_modes()) print_choices(mode.flag, mode.choices);
    print_choices("accumulation", accumulations());
    print_choices("schedule", schedules());
}

// ---------------------------------------------------------------------------------------------------------------------
// From flags to a run

struct Device {
    const char* name;
    std::unique_ptr<Model> (*make)(const Setup&);
};
const std::vector<Device> DEVICES = {{"auto", nullptr}, {"cpu", make_reference}, {"gpu", make_gpu}};

// Settles auto; `note` says why it is the CPU.
const Device& choose_device(const std::string& wanted, std::string* note) {
    const Device& device = find_row(DEVICES, wanted, "--device");
    if (device.make) return device;
    const std::string missing = why_no_gpu();
    if (!missing.empty()) *note = " (" + missing + ")";
    return find_row(DEVICES, missing.empty() ? "gpu" : "cpu", "--device");
}

void require_device(const Device& device) {  // said before the data is read; a plan needs none
    if (std::strcmp(device.name, "gpu") || why_no_gpu().empty()) return;
    throw Error("--device gpu cannot be used: " + why_no_gpu() + ".");
}

bool is_folder(const std::string& path) {
    std::error_code ignored;
    return fs::is_directory(path, ignored);
}

bool is_named_model(const std::string& name) {
    return std::any_of(models().begin(), models().end(), [&](const ModelConfig& c) { return c.name == name; });
}

ModelConfig named_or_folder(const std::string& name) {
    if (is_named_model(name)) return find_row(models(), name, "--model");
    if (is_folder(name)) return read_model_config(name);
    throw Error("--model " + name + " is neither a folder nor a named model; ./train --help lists the names.");
}

Format format_named(const std::string& name, const char* flag) {
    static const std::vector<FormatInfo> table(std::begin(FORMATS), std::end(FORMATS));
    return static_cast<Format>(&find_row(table, name, flag) - table.data());
}

// The formats of the moments, and what was left open of them into the flags.
OptimizerFormat choose_optimizer(Flags& flags, const Recipe& recipe) {
    if (flags.text("optimizer").empty()) flags.set("optimizer", recipe.optimizer);
    OptimizerFormat optimizer = find_row(optimizers(), flags.text("optimizer"), "--optimizer");
    for (auto [flag, format] : {std::pair{"m-format", &optimizer.m}, std::pair{"v-format", &optimizer.v}}) {
        if (flags.text(flag).empty()) flags.set(flag, info(*format).name);
        *format = format_named(flags.text(flag), (std::string("--") + flag).c_str());
    }
    return optimizer;
}

// The recipe's own accumulation into the flag, or the flag's into the recipe.
void choose_accumulation(Flags& flags, Recipe& recipe) {
    if (flags.text("accumulation").empty()) {  // and stays so where no row has the recipe's choice
        for (const Accumulation& row : accumulations())
            if (std::equal(row.fast, row.fast + 3, recipe.fast_accumulation)) flags.set("accumulation", row.name);
        return;
    }
    const Accumulation& chosen = find_row(accumulations(), flags.text("accumulation"), "--accumulation");
    std::copy(chosen.fast, chosen.fast + 3, recipe.fast_accumulation);
}

void choose_modes(const Flags& flags, Setup& setup) {
    for (const MemoryMode& mode : memory_modes()) {
        const Choice& choice = find_row(mode.choices, flags.text(mode.flag), (std::string("--") + mode.flag).c_str());
        mode.choose(setup, &choice == &mode.choices.front());
    }
}

// A model whose vocabulary is open takes that of the data, or of bytes where a plan asks and no data is named.
void choose_vocabulary(ModelConfig& config, const Corpus* corpus) {
    if (corpus && corpus->tokens_in_use > MAX_VOCABULARY)
        throw Error("--data holds token " + std::to_string(corpus->tokens_in_use - 1) + ", but no vocabulary may have more than " +
                    std::to_string(MAX_VOCABULARY) + " tokens; make the token files again (data/tokenize.py).");
    if (config.V == 0) config.V = corpus ? std::max(corpus->tokens_in_use, corpus->vocabulary.size()) : 256;
    if (corpus && corpus->tokens_in_use > config.V)
        throw Error("--data holds token " + std::to_string(corpus->tokens_in_use - 1) + ", but the vocabulary of " + config.name + " has " +
                    std::to_string(config.V) + " tokens; make the token files with this model's own tokenizer (data/tokenize.py).");
}

void print_settings(const Flags& flags, const Setup& setup, const Device& device, const std::string& note, const Corpus* corpus) {
    const ModelConfig& c = setup.config;
    std::printf("Settings\n");
    auto line = [](const char* name, const std::string& text) { std::printf("  %-14s %s\n", name, text.c_str()); };
    line("device", device.name + note);
    line("parameters", std::to_string(parameter_count(c)) + ": " + c.arch.name + ", " + std::to_string(c.L) + " layers, hidden size " +
                           std::to_string(c.C) + ", " + std::to_string(c.NH) + " heads (" + std::to_string(c.NKV) + " for keys and values), " +
                           "feed-forward " + std::to_string(c.F) + ", vocabulary " + std::to_string(c.V));
    if (corpus) line("text", printable(corpus->description));
    for (const Flag& flag : FLAGS)
        if (flag.value != Value::None && std::strcmp(flag.name, "device") && !flags.text(flag.name).empty())
            line(flag.name, escaped(flags.text(flag.name)));
}

// Bytes of a run on a CPU: beyond the plan the reference has FP32 copies of the weights, gradients in FP32, and the largest of both once more.
int64_t cpu_memory(const Setup& setup) {
    int64_t largest = 0;
    for (const Param& p : parameters(setup.config)) largest = std::max(largest, p.size());
    const int64_t copies = parameter_count(setup.config) * (4 + 4 - info(setup.recipe.compute).bytes) + 2 * 4 * largest;
    const int64_t batch = 2 * 4 * setup.accumulate * setup.B * setup.T;  // tokens and targets of a step
    return total_bytes(memory_plan(setup)) + copies + batch;
}

// Linux grants more memory than there is and kills the program later: so what is needed is compared with the machine first.
void require_memory(const Setup& setup) {
    const int64_t needed = cpu_memory(setup);
    const int64_t present = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    if (needed > present)
        throw Error("This run needs " + std::to_string(needed >> 20) + " MiB and workspace, but the machine has " + std::to_string(present >> 20) +
                    " MiB of memory; choose a smaller --model, --batch, --seq or --accumulate (./train --plan shows what takes how much).");
}

std::string parent_folder(const std::string& path) {
    const fs::path whole = fs::absolute(path).lexically_normal();
    return (whole.has_filename() ? whole : whole.parent_path()).parent_path().string();  // "out/step-000300/" has no file name
}

bool lies_in(const std::string& checkpoint, const std::string& out) {
    return !checkpoint.empty() && parent_folder(checkpoint) == parent_folder(out + "/x");
}

// The folder of a run's checkpoints, made if it is missing. While this lives no other run takes the folder: each would remove
// the other's checkpoints. (Some file systems have no locks; then nothing is kept.) A new folder that stayed empty goes again.
class FolderLock {
public:
    explicit FolderLock(const std::string& out) : out_(out) {
        std::error_code failed;
        made_ = !is_folder(out);
        create_folders(out, failed);
        folder_ = failed ? -1 : ::open(out.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (folder_ < 0 || access(out.c_str(), R_OK | W_OK | X_OK) != 0)
            throw Error("--out " + out + " cannot be written (" + (failed ? failed.message() : std::strerror(errno)) +
                        "); choose another folder, or \"\" to save nothing.");
        struct stat locked, named;  // they differ if another run has just removed the folder
        const bool held = (::flock(folder_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) && ::fstat(folder_, &locked) == 0 &&
                          ::stat(out.c_str(), &named) == 0 && locked.st_ino == named.st_ino;
        if (held) return;
        ::close(folder_);
        throw Error("--out " + out + " is the folder of another run that is going on; choose another folder.");
    }
    ~FolderLock() {
        if (made_) ::rmdir(out_.c_str());
        ::close(folder_);
    }
    FolderLock(const FolderLock&) = delete;
    FolderLock& operator=(const FolderLock&) = delete;

private:
    std::string out_;
    bool made_ = false;
    int folder_ = -1;
};

// Before the first step, so that hours of training do not end on a full disk. A run that saves more than once has at most three
// checkpoints at one time: the best, the last, and the next one while it is written.
void need_space(const Flags& flags, const Setup& setup, int64_t step, bool resumed_there) {
    const std::string& out = flags.text("out");
    const int64_t every = flags.count("save-every"), left = flags.count("steps") - step;
    const int64_t saves = every ? ceil_div(left + step % every, every) : 1, at_once = std::min<int64_t>(saves, resumed_there ? 2 : 3);
    const int64_t weight = setup.master ? 4 : 2;  // BF16, and the rest of the master
    const int64_t checkpoint = weight * parameter_count(setup.config) + total_bytes(memory_plan(setup), Category::Optimizer);
    std::error_code failed;
    const fs::space_info space = fs::space(out, failed);
    if (!failed && space.available < static_cast<uint64_t>(at_once * checkpoint))
        throw Error("--out " + out + " has " + std::to_string(space.available >> 20) + " MiB free, but " + std::to_string(at_once) + " more of " +
                    std::to_string(checkpoint >> 20) + " MiB each must fit; free some, choose another folder, or give a larger --save-every.");
}

void print_error(const std::string& sentence) {
    std::fflush(stdout);
    std::fprintf(stderr, "train: %s\n", printable(sentence).c_str());
}

// A new run must not share the folder of another one's checkpoints.
void require_no_other_run(const std::string& out, const std::string& resumed) {
    if (lies_in(resumed, out)) return;
    std::string found;
    try {
        found = find_checkpoint(out, print_error);
    } catch (const Error&) {
        return;  // none there
    }
    throw Error("--out " + out + " already holds the checkpoint " + found +
                ": go on from it with --resume " + out + ", or choose another folder with --out.");
}

// ---------------------------------------------------------------------------------------------------------------------
// Generated text

class Random {  // splitmix64
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    double uniform() {  // in [0, 1)
        uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
    }

private:
    uint64_t state_;
};

int32_t draw(const std::vector<float>& logits, double temperature, Random& random) {
    const double top = *std::max_element(logits.begin(), logits.end());
    double total = 0;
    std::vector<double> weights;
    for (float logit : logits) weights.push_back(total += std::exp((logit - top) / temperature));
    const auto chosen = std::upper_bound(weights.begin(), weights.end(), random.uniform() * total);
    return static_cast<int32_t>(std::min<int64_t>(chosen - weights.begin(), static_cast<int64_t>(weights.size()) - 1));
}

std::vector<int32_t> generate(Model& model, std::vector<int32_t> tokens, uint64_t seed) {
    constexpr double TEMPERATURE = 0.8;
    constexpr int64_t LONGEST = 256;  // tokens: a screenful
    Random random(seed);
    std::vector<float> logits(static_cast<size_t>(model.setup().config.V));
    while (static_cast<int64_t>(tokens.size()) < std::min(model.setup().T, LONGEST)) {
        model.next_logits(tokens.data(), static_cast<int64_t>(tokens.size()), logits.data());
        tokens.push_back(draw(logits, TEMPERATURE, random));
    }
    return tokens;
}

// Of 4096 tokens, evenly spaced (FNV-1a): tells one text from another of its length.
std::string sampled_hash(const TokenStream& tokens) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (int64_t i = 0; i < tokens.size(); i += std::max<int64_t>(1, tokens.size() / 4096))
        hash = (hash ^ static_cast<uint32_t>(tokens[i])) * 0x100000001B3u;
    return std::to_string(hash);
}

// ---------------------------------------------------------------------------------------------------------------------
// The log: one JSON object a line, on disk as soon as it is told

std::string json_text(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

class Log {
public:
    void open(const std::string& path, bool append) {
        path_ = path;
        require_log_or_nothing();
        // Non-blocking, since a named pipe without a reader would be waited for: that is an error. Writing then waits again.
        const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | (append ? O_APPEND : O_TRUNC), 0666);
        if (file < 0 && errno == ENXIO) throw Error("--log " + path + " is a pipe that nobody reads; start its reader first, or choose a file.");
        if (file >= 0) ::fcntl(file, F_SETFL, append ? O_APPEND : 0);
        file_.reset(file < 0 ? nullptr : ::fdopen(file, append ? "a" : "w"));
        if (!file_) throw Error("--log " + path + " cannot be written (" + std::strerror(errno) + "); choose another file.");
    }
    void write(const Json& line) {
        if (!file_ || (std::fprintf(file_.get(), "%s\n", json_text(line).c_str()) >= 0 && std::fflush(file_.get()) == 0)) return;
        std::fprintf(stderr, "train: --log %s cannot be written any more (%s); the run goes on without it.\n", escaped(path_).c_str(),
                     std::strerror(errno));
        file_.reset();
    }

private:
    // A log of an earlier run is written anew; any other file is somebody's.
    void require_log_or_nothing() const {
        std::error_code ignored;
        if (!fs::is_regular_file(path_, ignored)) return;  // reading a pipe would wait
        const std::string begin = "{\"kind\":\"settings\"";
        std::string found(begin.size(), '\0');
        std::ifstream file(path_, std::ios::binary);
        file.read(found.data(), static_cast<std::streamsize>(found.size()));
        if (file.gcount() > 0 && found != begin) throw Error("--log " + path_ + " is a file that is no log of this program; choose another file.");
    }

    struct Close {
        void operator()(FILE* file) const { std::fclose(file); }
    };
    std::unique_ptr<FILE, Close> file_;
    std::string path_;
};

// ---------------------------------------------------------------------------------------------------------------------
// The loop

volatile std::sig_atomic_t interrupted = 0;

void finish_at_interrupt() {  // the step is finished first; a second signal ends the program at once
    struct sigaction action = {};
    action.sa_handler = [](int signal) { interrupted = signal; };
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    for (int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
    struct sigaction before = {};
    sigaction(SIGHUP, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);  // what nohup has asked for stays
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string duration(double s) {
    const long long whole = std::llround(s);
    char text[48];
    if (whole < 3600) std::snprintf(text, sizeof text, "%lldm%02llds", whole / 60, whole % 60);
    else std::snprintf(text, sizeof text, "%lldh%02lldm", whole / 3600, whole / 60 % 60);
    return text;
}

struct Batch {  // (accumulate, B, T) each
    std::vector<int32_t> tokens, targets;
    Batch(int64_t micro_batches, int64_t tokens_each)
        : tokens(static_cast<size_t>(micro_batches * tokens_each)), targets(tokens.size()) {}
    void fill(Loader& loader, int64_t tokens_each) {
        for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(tokens_each)) loader.next(&tokens[at], &targets[at]);
    }
};

class Training {
public:
    // last_good: the run's newest checkpoint in --out; empty if it has none there
    Training(const Flags& flags, const Corpus& corpus, const Schedule& schedule, Model& model, const LoopState& state, const std::string& last_good)
        : flags_(flags), corpus_(corpus), schedule_(schedule), model_(model), setup_(model.setup()), state_(state), last_good_(last_good),
          train_(corpus.train, setup_.B, setup_.T, setup_.seed, true),
          validation_(corpus.validation, setup_.B, setup_.T, VALIDATION_SEED, true), resumed_at_(state.step), steps_(flags.count("steps")) {
        train_.seek(state_.position);
        Json settings = flags.remembered();
        settings["train_tokens"] = corpus.train.size();
        settings["train_hash"] = sampled_hash(corpus.train);
        state_.settings = json_text(settings);
        if (state_.run.empty()) state_.run = random_name();
        if (samples()) check_prompt();
    }

    int run() {
        start_log();
        if (steps_ == 0) return evaluate_only();
        try {
            return loop();
        } catch (...) {
            if (unsaved_) try_to_save();
            throw;
        }
    }

private:
    int loop() {
        if (state_.step == 0) validate(), state_.first_validation = state_.validation;
        started_ = seconds();
        while (state_.step < steps_) {
            step();
            const bool last = state_.step == steps_;
            if (interrupted && !last) return stop_early();
            const bool saves = !last && every("save-every") && !skipped_in_a_row_;  // a validated checkpoint can be the best one
            if (!last && (every("eval-every") || saves)) validate();
            if (every("sample-every") || (last && flags_.count("sample-every"))) sample();
            if (saves) save();
        }
        finish();
        return 0;
    }

    static constexpr int64_t VALIDATION_BATCHES = 20;
    static constexpr uint64_t VALIDATION_SEED = 0;  // the windows are the same whatever --seed is
    static constexpr int MOST_SKIPPED = 20;         // in a row: by then it is the run that is wrong, not a batch

    bool every(const char* flag) const { return flags_.count(flag) && state_.step % flags_.count(flag) == 0; }

    bool samples() const { return flags_.count("sample-every") && steps_ && !corpus_.vocabulary.empty(); }

    void check_prompt() {
        prompt_ = corpus_.vocabulary.encode(flags_.text("prompt"));
        if (prompt_.empty()) throw Error("--prompt is empty; give it at least one character, or --sample-every 0.");
        if (static_cast<int64_t>(prompt_.size()) >= setup_.T)
            throw Error("--prompt takes " + std::to_string(prompt_.size()) + " tokens, but --seq " + std::to_string(setup_.T) +
                        " must have room for more; shorten it.");
        if (*std::max_element(prompt_.begin(), prompt_.end()) >= setup_.config.V)
            throw Error("--prompt has a character that the model's vocabulary has not; choose another.");
    }

    void start_log() {
        if (!flags_.text("log").empty()) log_.open(flags_.text("log"), resumed_at_ > 0);
        Json line = {{"kind", "settings"}, {"step", state_.step}, {"parameters", parameter_count(setup_.config)}};
        line.update(flags_.typed());
        log_.write(line);
    }

    static std::string random_name() {
        std::random_device random;
        char text[17];
        std::snprintf(text, sizeof text, "%08x%08x", random(), random());
        return text;
    }

    void validate() {
        validation_.seek({});
        const int64_t batches = std::max<int64_t>(1, std::min(VALIDATION_BATCHES, validation_.windows() / setup_.B));
        Batch batch(1, setup_.B * setup_.T);
        double sum = 0;
        for (int64_t i = 0; i < batches; i++) {
            batch.fill(validation_, setup_.B * setup_.T);
            sum += model_.evaluate(batch.tokens.data(), batch.targets.data());
        }
        unsaved_ &= std::isfinite(sum);
        if (!std::isfinite(sum))
            throw Error(state_.step ? "The validation loss is not finite after step " + std::to_string(state_.step) +
                                          "; begin again with a lower --lr."
                                    : "The first validation loss is not finite: the weights of --model " + flags_.text("model") +
                                          " hold NaN or infinity; start from other weights.");
        state_.validation = sum / static_cast<double>(batches);
        std::printf("validation | step %lld | loss %.4f\n", static_cast<long long>(state_.step), state_.validation);
        std::fflush(stdout);
        log_.write({{"kind", "validation"}, {"step", state_.step}, {"loss", state_.validation}});
    }

    int evaluate_only() {
        validate();
        report_quantization();
        return 0;
    }

    // How the gradient's norm grows through backward, where no step before tells: of a step with learning rate 0 and gradients clipped to nothing.
    // Weights stay. Moments decay by a step, so that a first step's, which are zero, stay zero. Delayed scales see the batch twice. Empty if the
    // norm is not finite.
    std::vector<double> measured_norm_corrections(const Batch& batch, float clip) {
        AdamW measure{1, 0.0f};
        measure.clip = clip;
        measure.norm_correction.assign(bucket_ranges(parameters(setup_.config)).size(), std::numeric_limits<double>::infinity());
        const StepResult result = model_.step(batch.tokens.data(), batch.targets.data(), measure);
        return result.skipped ? std::vector<double>() : result.norm_correction;
    }

    void step() {
        const double before = seconds();
        Batch batch(setup_.accumulate, setup_.B * setup_.T);
        batch.fill(train_, setup_.B * setup_.T);
        train_.prefetch(setup_.accumulate);  // the next step's, while the model works on this one's
        unsaved_ = false;                    // if an error ends the step, the model is neither the old one nor the new one
        AdamW adamw{};
        adamw.step = state_.updates + 1;
        adamw.lr = learning_rate(schedule_, flags_.real("lr"), flags_.count("warmup"), steps_, state_.step);
        adamw.weight_decay = static_cast<float>(flags_.real("weight-decay"));
        adamw.clip = static_cast<float>(flags_.real("clip"));
        const bool unknown = !setup_.keep_gradients && adamw.clip > 0 && state_.norm_correction.empty();
        adamw.norm_correction = unknown ? measured_norm_corrections(batch, adamw.clip) : state_.norm_correction;
        const StepResult result = model_.step(batch.tokens.data(), batch.targets.data(), adamw);
        state_.step++;
        state_.updates += !result.skipped;
        if (!result.skipped) state_.norm_correction = result.norm_correction;
        state_.tokens += setup_.accumulate * setup_.B * setup_.T;
        state_.position = train_.position();
        state_.validation = std::numeric_limits<double>::quiet_NaN();
        skipped_in_a_row_ = result.skipped ? skipped_in_a_row_ + 1 : 0;
        unsaved_ = skipped_in_a_row_ < MOST_SKIPPED;
        print_step(result, adamw.lr, seconds() - before);
        if (skipped_in_a_row_ == MOST_SKIPPED)
            throw Error("The loss or a gradient was not finite in " + std::to_string(MOST_SKIPPED) +
                        " steps in a row; begin again with a lower --lr, or from the weights of the last checkpoint with --model and an --out "
                        "of its own.");
    }

    void print_step(const StepResult& result, float lr, double took) {
        const double tokens = static_cast<double>(setup_.accumulate * setup_.B * setup_.T);
        if (state_.step - resumed_at_ > 1) timed_ += took;  // the first step warms caches and starts threads
        const double left = (seconds() - started_) / static_cast<double>(state_.step - resumed_at_) * static_cast<double>(steps_ - state_.step);
        const int width = static_cast<int>(std::to_string(steps_).size());
        std::printf("step %*lld/%lld | loss %.4f | norm %.4f | lr %.3e | %.0f ms | %.0f tok/s | %s left", width,
                    static_cast<long long>(state_.step), static_cast<long long>(steps_), result.loss, result.grad_norm, static_cast<double>(lr),
                    took * 1e3, tokens / took, duration(left).c_str());
        if (result.skipped) std::printf(" | skipped: not finite (%lld so far)", static_cast<long long>(state_.step - state_.updates));
        std::printf("\n");
        std::fflush(stdout);
        log_.write({{"kind", "step"}, {"step", state_.step}, {"loss", result.loss}, {"grad_norm", result.grad_norm}, {"lr", lr},
                    {"ms", took * 1e3}, {"tokens_per_second", tokens / took}, {"skipped", result.skipped}});
    }

    void sample() {
        if (corpus_.vocabulary.empty()) return;  // said at the start
        const uint64_t seed = setup_.seed * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(state_.step);
        const double before = seconds();
        const std::vector<int32_t> tokens = generate(model_, prompt_, seed);
        const double each = (seconds() - before) / static_cast<double>(tokens.size() - prompt_.size());
        std::printf("sample | step %lld | %.2f ms a token\n----------\n%s\n----------\n", static_cast<long long>(state_.step), each * 1e3,
                    printable(corpus_.vocabulary.decode(tokens), Lines::Many).c_str());
        std::fflush(stdout);
    }

    void save() {
        unsaved_ = false;
        if (flags_.text("out").empty()) return;
        if (skipped_in_a_row_ && !last_good_.empty()) {  // the weights may be the reason: they take no good checkpoint's place
            std::printf("not saved: step %lld was skipped; the last good checkpoint stays | %s\n", static_cast<long long>(state_.step),
                        printable(last_good_).c_str());
        } else {
            last_good_ = save_checkpoint(flags_.text("out"), model_, state_);
            std::printf("saved | step %lld | %s\n", static_cast<long long>(state_.step), printable(last_good_).c_str());
        }
        std::fflush(stdout);
    }

    void try_to_save() {
        try {
            save();
        } catch (const std::exception&) {  // the first error is the one to tell
        }
    }

    int stop_early() {
        save();
        std::printf("Interrupted after step %lld%s\n", static_cast<long long>(state_.step),
                    last_good_.empty() ? "; nothing was saved, since --out is empty."
                                       : (": go on with ./train --resume " + printable(flags_.text("out"))).c_str());
        return 128 + interrupted;
    }

    void finish() {
        validate();
        save();
        report_quantization();
        const int64_t steps = state_.step - resumed_at_, timed_steps = steps - 1;
        const double tokens = static_cast<double>(setup_.accumulate * setup_.B * setup_.T);
        const double took = seconds() - started_, rate = timed_steps > 0 ? tokens * static_cast<double>(timed_steps) / timed_ : tokens / took;
        std::printf("\nDone: %lld steps in %s, %.0f tok/s; %lld skipped. Validation loss %.4f -> %.4f nats per token.\n",
                    static_cast<long long>(steps), duration(took).c_str(), rate, static_cast<long long>(state_.step - state_.updates),
                    state_.first_validation, state_.validation);
        log_.write({{"kind", "end"}, {"step", state_.step}, {"first_validation", state_.first_validation}, {"validation", state_.validation},
                    {"skipped", state_.step - state_.updates}, {"seconds", took}, {"tokens_per_second", rate}});
    }

    // How well FP8 did: one batch of the validation data, forward and backward; what encoding the moments that it would lead to loses; and the k
    // in use.
    void report_quantization() {
        validation_.seek({});
        Batch batch(1, setup_.B * setup_.T);
        batch.fill(validation_, setup_.B * setup_.T);
        const QuantReport report = model_.quantization(batch.tokens.data(), batch.targets.data());
        if (std::all_of(std::begin(report.kinds), std::end(report.kinds), [](const QuantStats& s) { return s.elements == 0; })) return;
        std::printf("\n%-17s | SNR      | quantized   | saturated | flushed to zero\n", "Quantization");
        for (size_t kind = 0; kind < std::size(report.kinds); kind++) {
            const QuantStats& s = report.kinds[kind];
            if (s.elements == 0) continue;
            std::printf("%-17s | %5.1f dB | %11lld | %9lld | %lld (%.3f%%)\n", KIND_NAMES[kind], s.snr_db(), static_cast<long long>(s.elements),
                        static_cast<long long>(s.saturated), static_cast<long long>(s.flushed),
                        100.0 * static_cast<double>(s.flushed) / static_cast<double>(s.elements));
        }
        print_spread("first moments", report.k_m);
        print_spread("second moments", report.k_v);
    }

    static void print_spread(const char* name, const std::vector<float>& k) {
        if (k.empty()) return;
        auto at = [&](double part) { return static_cast<double>(k[static_cast<size_t>(part * static_cast<double>(k.size() - 1))]); };
        std::printf("expansion factor k of %s: smallest %.2f, quartiles %.2f %.2f %.2f, largest %.2f\n", name, at(0), at(0.25), at(0.5), at(0.75),
                    at(1));
    }

    const Flags& flags_;
    const Corpus& corpus_;
    const Schedule& schedule_;
    Model& model_;
    const Setup& setup_;
    LoopState state_;
    std::string last_good_;
    bool unsaved_ = false;  // the model is that of a whole step, is sound as far as is known, and no checkpoint has it
    Loader train_, validation_;
    const int64_t resumed_at_, steps_;
    std::vector<int32_t> prompt_;
    Log log_;
    double started_ = 0, timed_ = 0;
    int skipped_in_a_row_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// From the command line to the exit code

struct Origin {  // of a run: a checkpoint to go on from, or nothing
    std::unique_ptr<FolderLock> lock;  // of --out; null if nothing is saved
    std::string checkpoint;
    LoopState state;
    int64_t train_tokens = 0;
    std::string train_hash;  // of an older checkpoint: empty
};

// The rows of the tables that the flags choose; Error where one is not known.
void choose_rows(Flags& flags, Setup& setup) {
    setup.recipe = find_row(recipes(), flags.text("recipe"), "--recipe");
    setup.optimizer = choose_optimizer(flags, setup.recipe);
    choose_accumulation(flags, setup.recipe);
    choose_modes(flags, setup);
    find_row(schedules(), flags.text("schedule"), "--schedule");
}

// A damaged checkpoint's settings are refused as such, and not as flags that the user gave.
void check_settings(const std::string& checkpoint, const nlohmann::json& settings) {
    Flags theirs;
    Setup ignored{};
    try {
        theirs.take(settings);
        theirs.take_defaults(false);
        theirs.typed();  // reads every number
        choose_rows(theirs, ignored);
    } catch (const Error& error) {
        throw Error("The settings in trainer.json of --resume " + checkpoint + " are damaged: " + error.what());
    }
}

Origin find_origin(Flags& flags) {
    Origin origin;
    const bool resumes = flags.given("resume");
    if (resumes && flags.text("resume").empty()) throw Error("--resume is empty; name a checkpoint, or a folder of them.");
    if (!flags.given("out")) flags.set("out", resumes ? parent_folder(find_checkpoint(flags.text("resume"))) : find_flag("out")->cpu);
    const bool saves = !flags.given("plan") && !flags.text("out").empty() && !(flags.given("steps") && flags.count("steps") == 0);
    if (saves) origin.lock = std::make_unique<FolderLock>(flags.text("out"));
    if (!resumes) return origin;
    origin.checkpoint = find_checkpoint(flags.text("resume"), print_error);  // under the lock: what was found before may be gone
    origin.state = read_loop_state(origin.checkpoint);
    try {
        std::string why;
        const std::string& text = origin.state.settings;
        const nlohmann::json settings = parse_json(text.data(), static_cast<int64_t>(text.size()), &why);
        origin.train_tokens = static_cast<int64_t>(settings.at("train_tokens").get_ref<const uint64_t&>());
        origin.train_hash = settings.value("train_hash", "");
        check_settings(origin.checkpoint, settings);
        flags.take(settings);
    } catch (const nlohmann::json::exception&) {
        throw Error("--resume " + origin.checkpoint + " has no settings of this program in its trainer.json; start from its weights with --model.");
    }
    return origin;
}

// The order and the position of the training data mean something for these very tokens alone.
void require_same_data(const Origin& origin, const Corpus& corpus) {
    if (origin.checkpoint.empty()) return;
    if (origin.train_tokens != corpus.train.size())
        throw Error("--data has " + std::to_string(corpus.train.size()) + " training tokens, but the checkpoint's run had " +
                    std::to_string(origin.train_tokens) + "; name the same data again.");
    if (!origin.train_hash.empty() && origin.train_hash != sampled_hash(corpus.train))
        throw Error("--data has as many training tokens as the checkpoint's run had, but other ones; name the same data again.");
}

void require_same_buckets(const Origin& origin, const ModelConfig& config) {
    const size_t buckets = bucket_ranges(parameters(config)).size();
    if (!origin.state.norm_correction.empty() && origin.state.norm_correction.size() != buckets)
        throw Error("--resume " + origin.checkpoint + " has " + std::to_string(origin.state.norm_correction.size()) +
                    " numbers of norm_correction in its trainer.json, but the model has " + std::to_string(buckets) + " buckets; resume from another checkpoint.");
}

void require_steps_left(const Flags& flags, const Origin& origin) {
    if (origin.checkpoint.empty() || flags.count("steps") == 0 || flags.count("steps") > origin.state.step) return;
    throw Error("--steps " + flags.text("steps") + " is already done: the checkpoint is at step " + std::to_string(origin.state.step) +
                "; give a larger --steps to go on.");
}

void print_start(const Origin& origin, const Corpus& corpus, const Setup& setup) {
    std::printf("\n");
    if (!origin.checkpoint.empty())
        std::printf("Going on from %s, step %lld, %lld tokens.\n", printable(origin.checkpoint).c_str(), static_cast<long long>(origin.state.step),
                    static_cast<long long>(origin.state.tokens));
    if (corpus.vocabulary.empty())
        std::printf("Samples will not be printed: the token files have no table of their vocabulary beside them (data/tokenize.py writes it).\n");
    else if (corpus.vocabulary.size() == 256 && setup.config.V > 256)
        std::printf("The text is read as bytes, of which there are 256, but the model's vocabulary has %lld tokens: data/tokenize.py makes token files.\n",
                    static_cast<long long>(setup.config.V));
}

int train(const Device& device, const Flags& flags, const Corpus& corpus, const Setup& setup, const Origin& origin) {
    const Schedule& schedule = find_row(schedules(), flags.text("schedule"), "--schedule");
    const bool named = origin.checkpoint.empty() && is_named_model(flags.text("model"));
    const std::string weights = origin.checkpoint.empty() ? flags.text("model") : origin.checkpoint;
    if (!named) check_weights(weights, setup.config);
    if (!std::strcmp(device.name, "cpu")) require_memory(setup);
    const std::unique_ptr<Model> model = device.make(setup);
    if (!origin.checkpoint.empty()) load_checkpoint(origin.checkpoint, *model);
    else if (!named) load_weights(weights, *model);
    const bool resumed_there = lies_in(origin.checkpoint, flags.text("out"));
    Training training(flags, corpus, schedule, *model, origin.state, resumed_there ? origin.checkpoint : "");
    if (origin.lock) need_space(flags, setup, origin.state.step, resumed_there);
    if (flags.count("steps")) finish_at_interrupt();  // an evaluation has nothing to finish
    return training.run();
}

int run(int argc, char** argv) {
    Flags flags;
    flags.parse(argc, argv);
    if (flags.given("help")) return print_help(), 0;
    const Origin origin = find_origin(flags);
    const bool plan_only = flags.given("plan"), chose_seq = flags.given("seq"), chose_data = flags.given("data");
    std::string note;
    const std::string wanted = flags.given("device") ? flags.text("device") : "auto";
    const Device& device = choose_device(wanted, &note);
    if (!plan_only) require_device(device);
    flags.take_defaults(!std::strcmp(device.name, "gpu"));

    Setup setup{};
    choose_rows(flags, setup);
    setup.config = origin.checkpoint.empty() ? named_or_folder(flags.text("model")) : read_model_config(origin.checkpoint);
    if (!plan_only) require_steps_left(flags, origin);
    if (origin.lock) require_no_other_run(flags.text("out"), origin.checkpoint);

    std::unique_ptr<Corpus> corpus;
    if (!plan_only || (setup.config.V == 0 && chose_data)) corpus = std::make_unique<Corpus>(load_corpus(flags.text("data")));
    choose_vocabulary(setup.config, corpus.get());
    if (!chose_seq) flags.set("seq", std::to_string(std::min(flags.count("seq"), setup.config.max_T)));
    setup.B = flags.count("batch");
    setup.T = flags.count("seq");
    setup.accumulate = flags.count("accumulate");
    setup.seed = static_cast<uint64_t>(flags.count("seed"));
    validate(setup);
    if (corpus) require_same_data(origin, *corpus);
    require_same_buckets(origin, setup.config);

    print_settings(flags, setup, device, note, corpus.get());
    print_precision_plan(setup);
    print_memory_plan(setup);
    if (plan_only) return 0;
    print_start(origin, *corpus, setup);
    std::fflush(stdout);
    try {
        return train(device, flags, *corpus, setup, origin);
    } catch (const std::bad_alloc&) {
        const bool cpu = !std::strcmp(device.name, "cpu");
        const std::string needs = cpu ? ": this run needs " + std::to_string(cpu_memory(setup) >> 20) + " MiB and workspace" : "";
        throw Error("The machine's memory ran out" + needs + "; close other programs, or choose a smaller --model, --batch, --seq or --accumulate.");
    }
}

// GNU's OpenMP spins at the end of every parallel loop unless it is told not to before main; on a machine that has other work
// too, a step then takes several times as long. So the program starts itself once more with the setting (if it cannot, it goes on).
void wait_without_spinning(char** argv) {
    if (std::getenv("OMP_WAIT_POLICY")) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);
}

// A closed stdin, stdout or stderr would give its number to the next file, say a log, and what is printed would go there.
void open_standard_files() {
    int file;
    do file = ::open("/dev/null", O_RDWR);
    while (file >= 0 && file <= 2);
    if (file > 2) ::close(file);
}

}  // namespace

int main(int argc, char** argv) {
    open_standard_files();
    wait_without_spinning(argv);
    std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is a failed write, which gets a sentence, and not the program's end
    std::signal(SIGPIPE, SIG_IGN);  // as is a pipe without a reader: who stops looking at a run does not stop it
    rlimit files{};
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);  // token files stay open
    try {
        return run(argc, argv);
    } catch (const Error& error) {
        print_error(error.what());
    } catch (const fs::filesystem_error& error) {
        std::fprintf(stderr, "train: %s cannot be used (%s); check its path and that you may read it.\n", escaped(error.path1().string()).c_str(),
                     error.code().message().c_str());
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "train: The memory ran out while the data was read; give --data less text.\n");
    } catch (const std::exception& error) {
        print_error(std::string("The system refused what the program needs (") + error.what() + "); check the limits that ulimit -a lists.");
    }
    return 1;
}
