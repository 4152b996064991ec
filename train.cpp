// train.cpp - the program: flags in, a trained model out.
//
// In the order of a run: what is known of it (Run), its flags, the checkpoint that it continues, its data,
// the plan, samples, the log, and the training loop (Training::loop). run() at the end goes through these
// stages. This file knows models through model.h's Model, files through data/, the command line through
// flags.h. It contains no CUDA and no file format.
#include "flags.h"

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
#include <new>
#include <random>
#include <thread>
#include <tuple>

#include "data/checkpoint.h"
#include "data/file.h"
#include "data/json.h"
#include "data/tokens.h"
#include "model.h"
#include "plan.h"
#include "ranks.h"

#ifndef COAT_CUDA  // built without nvcc: there is no model.cu
namespace coat {
std::string why_no_gpu(int) {
    return "this program was built without CUDA: install the CUDA toolkit (nvcc) and run make again";
}
std::unique_ptr<Model> make_gpu(const Setup&) { throw Error(why_no_gpu(), "."); }
}  // namespace coat
#endif

namespace {

using namespace coat;
namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// -----------------------------------------------------------------------------------------------------------
// A run before it has a model

struct Prompt {
    Vocabulary vocabulary;        // empty: samples are printed as token numbers
    std::vector<int32_t> tokens;  // none: no samples
};

using Log = std::unique_ptr<FILE, int (*)(FILE*)>;

// What the flags, the checkpoint and the data say. run() completes it stage by stage.
struct Run {
    Flags flags;
    Setup setup{};
    ProcessGroup* processes = nullptr;  // all ranks, also if there is only this one
    std::string device, why_cpu;     // "cpu" or "gpu"; why auto is not the GPU
    std::shared_ptr<const Descriptor> lock;  // of --out, on rank 0; null if nothing is saved
    std::string checkpoint;          // that the run continues, or empty
    std::string last_good;           // the newest checkpoint of this run in --out, or empty
    LoopState state;
    int64_t train_tokens = 0;        // of the checkpoint's run
    std::string train_hash;          // their sampled_hash()
    std::string weights;             // the folder to load them from; empty: the first weights are random
    std::unique_ptr<Corpus> corpus;  // null: a plan without data
    Prompt prompt;
    Companions companions;           // of `weights`, on rank 0 if it saves
    Log log{nullptr, std::fclose};   // of --log, on rank 0

    bool gpu() const { return device == "gpu"; }
    bool plan_only() const { return flags.given("plan"); }
    bool evaluates() const { return flags.count("steps") == 0; }
};

// -----------------------------------------------------------------------------------------------------------
// Flags

// As an argument in a command of the shell: in quotes, if it needs any.
std::string for_shell(const std::string& text) {
    const char* const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./";
    if (!text.empty() && text.find_first_not_of(plain) == std::string::npos) return text;
    std::string quoted = "'";
    for (char c : text) quoted += c == '\'' ? "'\\''" : std::string(1, c);
    return quoted + "'";
}

// Resolves auto: the GPU if there is one. A plan needs no device. local: the GPU of this rank.
void choose_device(Run& run, int local) {
    static const std::vector<Choice> known = {{"auto", ""}, {"cpu", ""}, {"gpu", ""}};
    const std::string wanted = run.flags.given("device") ? run.flags.text("device") : "auto";
    run.device = find_row(known, wanted, "--device").name;
    if (wanted == "cpu" || (wanted == "gpu" && run.plan_only())) return;
    run.why_cpu = why_no_gpu(local);
    run.device = run.why_cpu.empty() ? "gpu" : "cpu";
    if (wanted == "gpu" && !run.gpu()) throw Error("--device gpu cannot be used: ", run.why_cpu, ".");
}

// The rows of the tables that the flags choose; Error if there is no such row. What a flag left open is
// written into it.
void choose_rows(Flags& flags, Setup& setup) {
    setup.recipe = find_row(recipes(), flags.text("recipe"), "--recipe");
    if (flags.text("optimizer").empty()) flags.set("optimizer", setup.recipe.optimizer);
    setup.optimizer = find_row(optimizers(), flags.text("optimizer"), "--optimizer");
    for (const MemoryMode& mode : memory_modes()) {
        const Choice& choice = find_row(mode.choices, flags.text(mode.flag), concat("--", mode.flag).c_str());
        mode.choose(setup, &choice == &mode.choices.front());
    }
    find_row(schedules(), flags.text("schedule"), "--schedule");
    if (!setup.keep_gradients && flags.real("clip") > 0)
        throw Error("--gradients none updates weights before the norm of all gradients is known; use --clip 0 "
                    "with it.");
}

// --model is a named model, or a folder with weights. A run that continues has those of its checkpoint.
void choose_model(Run& run) {
    const std::string& name = run.flags.text("model");
    const bool named =
        std::any_of(models().begin(), models().end(), [&](auto& c) { return c.name == name; });
    if (!run.checkpoint.empty()) run.weights = run.checkpoint;
    else if (!named && fs::is_directory(name)) run.weights = name;
    else if (!named)
        throw Error("--model ", name,
                    " is neither a folder nor a named model; ./train --help lists the names.");
    run.setup.config =
        run.weights.empty() ? find_row(models(), name, "--model") : read_model_config(run.weights);
}

// Ranks that were started by hand, or on several hosts, may have other flags or data.
void require_same_flag(ProcessGroup& processes, const char* flag, const std::string& mine) {
    const std::vector<std::string> all = processes.all_gather(mine);
    for (size_t rank = 1; rank < all.size(); rank++)
        if (all[rank] != all[0])
            throw Error("Rank ", rank, " was started with --", flag, " \"", escaped(all[rank]),
                        "\", but rank 0 with \"", escaped(all[0]), "\"; give every rank the same flags.");
}

// -----------------------------------------------------------------------------------------------------------
// The folder of checkpoints, and the checkpoint that a run continues

// An absolute path without "." and "..", and without a slash at its end.
fs::path normal_path(const std::string& path) {
    const fs::path whole = fs::absolute(path).lexically_normal();
    return whole.has_filename() ? whole : whole.parent_path();  // of "out/step-000300/"
}

// Locks the folder of a run's checkpoints, because two runs would remove each other's. Creates the folder if
// it is missing. When the lock is released, a folder created here is removed if it is still empty. (Some file
// systems have no locks; then nothing is locked.)
std::shared_ptr<const Descriptor> lock_folder(const std::string& out) {
    std::error_code failed;
    const bool made = !fs::is_directory(out);
    create_folders(out, failed);
    auto folder = std::make_unique<const Descriptor>(out, O_RDONLY | O_DIRECTORY);
    if (failed || *folder < 0 || access(out.c_str(), R_OK | W_OK | X_OK) != 0)
        throw Error("--out ", out, " cannot be written (", failed ? failed.message() : std::strerror(errno),
                    "); choose another folder, or \"\" to save nothing.");
    const bool ours = ::flock(*folder, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
    struct stat locked, named;  // they differ if another run has just removed the folder
    if (!ours || ::fstat(*folder, &locked) != 0 || ::stat(out.c_str(), &named) != 0 ||
        locked.st_ino != named.st_ino)
        throw Error("--out ", out, " is the folder of another run that is going on; choose another folder.");
    return {folder.release(), [made, out](const Descriptor* locked_folder) {
                if (made) ::rmdir(out.c_str());
                delete locked_folder;
            }};
}

// A new run must not use the folder of another run's checkpoints.
void require_no_other_run(const Run& run) {
    const std::string& out = run.flags.text("out");
    if (!run.lock || !run.last_good.empty()) return;
    std::string found;
    try {
        found = find_checkpoint(out, print_error);
    } catch (const Error&) {
        return;  // there is none
    }
    throw Error("--out ", out, " already holds the checkpoint ", found, "; continue it with --resume ",
                for_shell(out), ", or choose another folder with --out.");
}

// Errors in a damaged checkpoint's settings must not look like errors in the user's flags.
void check_settings(const std::string& checkpoint, const nlohmann::json& settings) {
    Flags theirs;
    Setup ignored{};
    try {
        theirs.take(settings);
        theirs.take_defaults(false);
        theirs.typed();  // parses every number
        choose_rows(theirs, ignored);
    } catch (const Error& error) {
        throw Error("The settings in trainer.json of --resume ", checkpoint, " are damaged: ", error.what());
    }
}

// A checkpoint stores the micro-batches of all ranks together. Divides them among the present ranks, whose
// number may differ.
void share_micro_batches(const Flags& flags, nlohmann::json& settings, int64_t ranks) {
    const auto all = int64_t(find_flag("accumulate").parse(settings.at("accumulate").get<std::string>()));
    const std::string micro_batches = concat(all, " micro-batches a step");
    if (settings.value("gradients", "") == "none" && all != ranks)
        throw Error("The run has --gradients none, so each of its ", micro_batches,
                    " needs a rank of its own; continue it with --ranks ", all, ".");
    if (all % ranks)
        throw Error("The run has ", micro_batches, ", which ", ranks,
                    " ranks cannot share; use a number of ranks that divides ", all, ".");
    if (ranks > 1 && flags.given("accumulate") && flags.count("accumulate") * ranks != all)
        throw Error("--accumulate ", flags.text("accumulate"), " on ", ranks,
                    " ranks differs from the checkpoint's ", micro_batches,
                    "; leave it out to continue that run, or leave --resume out to begin another.");
    settings["accumulate"] = std::to_string(all / ranks);
}

// The state and the settings of the checkpoint's run. A flag that is given here comes before its setting.
void take_settings(Run& run) {
    run.state = read_loop_state(run.checkpoint);
    try {
        std::string why;
        const std::string& text = run.state.settings;
        nlohmann::json settings = parse_json(text.data(), text.size(), &why);
        run.train_tokens = settings.at("train_tokens").get_ref<const uint64_t&>();
        run.train_hash = settings.at("train_hash").get<std::string>();
        check_settings(run.checkpoint, settings);
        share_micro_batches(run.flags, settings, run.setup.ranks);
        run.flags.take(settings);
    } catch (const nlohmann::json::exception&) {
        throw Error("--resume ", run.checkpoint,
                    " has no settings in its trainer.json; start from its weights with --model.");
    }
}

// Rank 0 alone looks at --out and chooses the checkpoint; it tells the others.
void choose_checkpoint(Run& run) {
    Flags& flags = run.flags;
    const bool resumes = flags.given("resume");
    if (resumes && flags.text("resume").empty())
        throw Error("--resume is empty; name a checkpoint, or a folder of them.");
    std::string out;
    if (run.processes->rank() == 0) {
        if (flags.given("out")) out = flags.text("out");
        else if (resumes) out = normal_path(find_checkpoint(flags.text("resume"))).parent_path().string();
        else out = find_flag("out").standard;
        const bool trains = !run.plan_only() && !(flags.given("steps") && run.evaluates());
        if (trains && !out.empty()) run.lock = lock_folder(out);
        // Found again, now under the lock: another run may have removed it.
        if (resumes) run.checkpoint = find_checkpoint(flags.text("resume"), print_error);
        if (resumes && !out.empty() && normal_path(run.checkpoint).parent_path() == normal_path(out))
            run.last_good = run.checkpoint;
    }
    for (std::string* chosen : {&out, &run.checkpoint, &run.last_good})
        *chosen = run.processes->all_gather(*chosen).front();
    flags.set("out", out);
    if (!run.checkpoint.empty()) take_settings(run);
}

// -----------------------------------------------------------------------------------------------------------
// Data

// A hash (FNV-1a) of 4096 to 8191 evenly spaced tokens, or of all if they are fewer: it tells apart texts of
// the same length. With a mask, a token that does not count enters it inverted.
std::string sampled_hash(const TokenStream& tokens) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (int64_t i = 0; i < tokens.size(); i += std::max<int64_t>(1, tokens.size() / 4096)) {
        int32_t token;
        tokens.read(i, 1, &token);
        int32_t target = token;
        tokens.mask(i, 1, &target);
        hash = (hash ^ uint32_t(target == NO_TARGET ? ~token : token)) * 0x100000001B3u;
    }
    return std::to_string(hash);
}

// A model without a vocabulary size takes that of the data; --plan without data takes that of bytes.
void choose_vocabulary(ModelConfig& config, const Corpus* corpus) {
    if (config.V == 0) config.V = corpus ? std::max(corpus->tokens_in_use, corpus->vocabulary.size()) : 256;
    if (!corpus || (corpus->tokens_in_use <= MAX_VOCABULARY && corpus->tokens_in_use <= config.V)) return;
    const std::string limit = corpus->tokens_in_use > MAX_VOCABULARY
                                  ? concat("a vocabulary may have at most ", MAX_VOCABULARY)
                                  : concat("the vocabulary of ", config.name, " has ", config.V);
    throw Error("--data contains token ", corpus->tokens_in_use - 1, ", but ", limit,
                " tokens; make the token files with this model's tokenizer (data/tokenize.py).");
}

// Each rank takes its micro-batches from a stream that all of them read.
void require_same_data(ProcessGroup& processes, const Corpus& corpus) {
    std::string mine;
    for (const TokenStream* tokens : {&corpus.train, &corpus.validation})
        mine += concat(tokens->size(), " ", sampled_hash(*tokens), " ");
    const std::vector<std::string> all = processes.all_gather(mine);
    for (size_t rank = 1; rank < all.size(); rank++)
        if (all[rank] != all[0])
            throw Error("Rank ", rank, " reads other --data than rank 0; give every rank the same data.");
}

// The checkpoint must fit the data (a plan may have none) and the model.
void require_same_run(const Run& run) {
    if (run.checkpoint.empty()) return;
    const TokenStream* const tokens = run.corpus ? &run.corpus->train : nullptr;
    if (tokens && run.train_tokens != tokens->size())
        throw Error("--data has ", tokens->size(), " training tokens, but the checkpoint's run had ",
                    run.train_tokens, "; give the same data again.");
    if (tokens && run.train_hash != sampled_hash(*tokens))
        throw Error("--data has other training tokens than the checkpoint's run; give the same data again.");
}

// -----------------------------------------------------------------------------------------------------------
// The plan: what a run is, and what it needs

// Every flag that has a value in this run, given or not.
void print_settings(const Run& run) {
    const Flags& flags = run.flags;
    const ModelConfig& c = run.setup.config;
    std::printf("\nSettings\n");
    auto line = [](const char* name, const std::string& text) {
        std::printf("  %-14s %s\n", name, text.c_str());
    };
    line("device", run.device + (run.why_cpu.empty() ? "" : " (" + run.why_cpu + ")"));
    if (run.setup.ranks > 1) line("ranks", std::to_string(run.setup.ranks));
    line("parameters", concat(parameter_count(c), ": ", c.arch.name, ", ", c.L, " layers, hidden size ", c.C,
                              ", ", c.NH, " heads (", c.NKV, " for keys and values), feed-forward size ", c.F,
                              ", vocabulary ", c.V));
    if (run.corpus) line("text", printable(run.corpus->description));
    const std::vector<std::string> above = {"device", "ranks"};
    for (const Flag& flag : flag_table()) {
        const std::string value = flag.setting() ? flags.text(flag.name) : "";
        if (!value.empty() && !std::count(above.begin(), above.end(), flag.name))
            line(flag.name, escaped(value));
    }
}

// The memory of a run on the CPU without workspace. In addition to the plan, the reference has the weights in
// FP32, with several ranks their sums of gradients, the largest weight and gradient a second time, and the
// batch. All gradients in FP32 take the place of the plan's.
int64_t cpu_memory(const Setup& setup) {
    int64_t largest = 0;
    for (const Param& p : parameters(setup.config)) largest = std::max(largest, p.size());
    const int64_t each = 4 * (setup.ranks > 1 ? 3 : 2);  // bytes for a parameter: weight, gradient, sum
    const int64_t batch = 2 * 4 * setup.accumulate * setup.B * setup.T;
    const std::vector<MemoryRow> plan = memory_plan(setup);
    return total_bytes(plan) - total_bytes(plan, Category::Gradients) +
           parameter_count(setup.config) * each + 2 * 4 * largest + batch;
}

// Linux grants more memory than the machine or the container has, and later ends the program: so this is
// checked first.
void require_memory(const Setup& setup, int64_t processes) {
    const int64_t needed = cpu_memory(setup) * processes;
    int64_t present = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    for (const char* limit : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"})
        if (int64_t bytes; std::ifstream(limit) >> bytes) present = std::min(present, bytes);  // or "max"
    if (needed > present)
        throw Error("This run needs ", needed >> 20, " MiB and workspace, but the machine or container has ",
                    present >> 20, " MiB of memory; choose a smaller --model, --batch, --seq or --accumulate "
                    "(./train --plan shows what needs how much).");
}

// A full disk must be found before training. A run that saves more than once has at most three checkpoints at
// a time: the best, the last, and the next one while it is written.
void require_space(const Run& run) {
    const Setup& setup = run.setup;
    const std::string& out = run.flags.text("out");
    const int64_t step = run.state.step, left = run.flags.count("steps") - step;
    const int64_t every = run.flags.count("save-every");
    const int64_t saves = every ? ceil_div(left + step % every, every) : 1,
                  at_once = std::min<int64_t>(saves, run.last_good.empty() ? 3 : 2);
    const int64_t weight_bytes = setup.master ? 4 : 2;  // BF16, and the rest of the master
    Setup whole = setup;  // the files have what all ranks keep
    whole.rank = 0, whole.ranks = 1;
    const int64_t bytes =
        weight_bytes * parameter_count(setup.config) + total_bytes(memory_plan(whole), Category::Optimizer);
    std::error_code failed;
    const fs::space_info space = fs::space(out, failed);
    if (!failed && space.available < uint64_t(at_once * bytes))
        throw Error("--out ", out, " has ", space.available >> 20, " MiB free, but needs room for ", at_once,
                    " more checkpoints of ", bytes >> 20,
                    " MiB each; free some space, choose another folder, or give a larger --save-every.");
}

// What is good to know before the first step: where it continues, and whether the text is read as bytes.
void print_start(const Run& run) {
    std::printf("\n");
    if (!run.checkpoint.empty())
        std::printf("Continuing %s, step %ld, %ld tokens.\n", printable(run.checkpoint).c_str(),
                    run.state.step, run.state.tokens);
    const int64_t V = run.setup.config.V;
    if (run.corpus->vocabulary.size() == 256 && V > 256)
        std::printf("The text is read as bytes (256 tokens), but the model's vocabulary has %ld tokens: "
                    "data/tokenize.py makes token files.\n", V);
}

// -----------------------------------------------------------------------------------------------------------
// Samples

// data/tokenize.py, which is in the folder of this program or in one above it.
std::string tokenize_script() {
    for (fs::path folder = fs::read_symlink("/proc/self/exe"); folder.has_relative_path();) {
        folder = folder.parent_path();
        if (fs::exists(folder / "data/tokenize.py")) return (folder / "data/tokenize.py").string();
    }
    return "data/tokenize.py";
}

// The prompt in the tokens of a model folder's own tokenizer. The C++ program has no BPE: Python's package
// tokenizers reads tokenizer.json. Without it the prompt is token 0.
Prompt tokenize_prompt(const std::string& folder, const std::string& text) {
    const std::string command = "python3 " + for_shell(tokenize_script()) + " --tokenizer=" +
                                for_shell(folder) + " --prompt=" + for_shell(text) + " 2>&1";
    FILE* const pipe = ::popen(command.c_str(), "r");
    std::string printed, why;
    char part[1 << 16];
    for (size_t n; pipe && (n = std::fread(part, 1, sizeof part, pipe)) > 0;) printed.append(part, n);
    const int status = pipe ? ::pclose(pipe) : -1;
    while (!printed.empty() && printed.back() == '\n') printed.pop_back();
    printed.erase(0, printed.rfind('\n') + 1);  // the last line: the tokens, or why there are none
    if (status == 0) {
        const nlohmann::json table = parse_json(printed.data(), printed.size(), &why);
        if (why.empty()) return {Vocabulary::of(table, folder), table.at("prompt")};
    }
    const bool no_python = status == -1 || (WIFEXITED(status) && WEXITSTATUS(status) == 127);
    std::printf("--prompt cannot be tokenized, so the sample begins with token 0 and has token numbers: %s\n",
                no_python ? "python3 is missing; install Python." : escaped(printed, 500).c_str());
    return {{}, {0}};
}

// In a run, samples have the vocabulary of the data. With --steps 0 a --prompt that is given has the tokens
// of the model folder's tokenizer, if there is one. Rank 0 tokenizes for all.
Prompt choose_prompt(const Run& run) {
    const Flags& flags = run.flags;
    Prompt prompt{run.corpus->vocabulary, {}};
    if (run.evaluates() ? !flags.given("prompt") : flags.count("sample-every") == 0) return prompt;
    if (run.evaluates() && !run.weights.empty() && fs::exists(run.weights + "/tokenizer.json")) {
        if (run.setup.rank == 0) prompt = tokenize_prompt(run.weights, flags.text("prompt"));
        prompt.tokens = run.processes->all_gather(prompt.tokens).front();
    } else if (!prompt.vocabulary.empty()) {
        prompt.tokens = prompt.vocabulary.encode(flags.text("prompt"));
    } else {
        std::printf("No samples will be printed: the token files have no vocabulary.json beside them "
                    "(data/tokenize.py writes it).\n");
        return prompt;
    }
    if (prompt.tokens.empty())
        throw Error("--prompt is empty; give it at least one character.");
    if (int64_t(prompt.tokens.size()) >= run.setup.T)
        throw Error("--prompt has ", prompt.tokens.size(), " tokens, but --seq ", run.setup.T,
                    " must have room for more; shorten it.");
    if (*std::max_element(prompt.tokens.begin(), prompt.tokens.end()) >= run.setup.config.V)
        throw Error("--prompt has a token that is not in the model's vocabulary; choose another.");
    return prompt;
}

double uniform(uint64_t* state) {  // in [0, 1), by splitmix64
    uint64_t z = *state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return double((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

// A token with the probability softmax(logits / temperature). Temperature 0: the most probable one.
int32_t draw(const std::vector<float>& logits, double temperature, uint64_t* random) {
    const auto best = std::max_element(logits.begin(), logits.end());
    if (temperature == 0) return int32_t(best - logits.begin());
    const double top = *best;
    double total = 0;
    std::vector<double> sums;
    for (float logit : logits) sums.push_back(total += std::exp((logit - top) / temperature));
    const auto chosen = std::upper_bound(sums.begin(), sums.end() - 1, uniform(random) * total);
    return int32_t(chosen - sums.begin());
}

// -----------------------------------------------------------------------------------------------------------
// The log: one JSON object per line, written at once

// Bytes that are not UTF-8, say of a path, do not end the run: they are replaced.
std::string json_text(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

// Appends to the log of an earlier run, or begins one. Any other file is an error.
FILE* open_log(const std::string& path) {
    std::error_code ignored;
    const std::string begin = "{\"kind\":\"settings\"";
    std::string found(begin.size(), '\0');
    if (fs::is_regular_file(path, ignored) &&  // reading a pipe would wait
        std::ifstream(path, std::ios::binary).read(found.data(), found.size()).gcount() > 0 && found != begin)
        throw Error("--log ", path, " exists and is not a log of this program; choose another file.");
    // Opening a named pipe without a reader would wait; with O_NONBLOCK it fails. The F_SETFL below
    // makes writes wait again.
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_APPEND, 0666);
    if (file < 0 && errno == ENXIO)
        throw Error("--log ", path, " is a pipe without a reader; start its reader first, or choose a file.");
    if (file >= 0) ::fcntl(file, F_SETFL, O_APPEND);
    FILE* const log = file < 0 ? nullptr : ::fdopen(file, "a");
    if (!log)
        throw Error("--log ", path, " cannot be written (", std::strerror(errno), "); choose another file.");
    return log;
}

// -----------------------------------------------------------------------------------------------------------
// The training loop. Every rank goes through it; rank 0 alone prints, logs and saves.

// Of several ranks, each has measured the moments that it keeps: adds their counts, joins their factors k.
void merge_moments(QuantReport& report, const Setup& setup) {
    if (!setup.processes) return;
    for (Kind kind : {Kind::Moment1, Kind::Moment2}) {
        QuantStats sum;
        for (const QuantStats& s : setup.processes->all_gather(report.kinds[int(kind)])) sum += s;
        report.kinds[int(kind)] = sum;
    }
    for (std::vector<float>* k : {&report.k_m, &report.k_v}) {
        std::vector<float> all;
        for (const std::vector<float>& theirs : setup.processes->all_gather(*k))
            all.insert(all.end(), theirs.begin(), theirs.end());
        std::sort(all.begin(), all.end());
        *k = all;
    }
}

volatile std::sig_atomic_t interrupted = 0;

void finish_step_at_interrupt() {  // a second signal ends the program at once
    struct sigaction action = {}, before = {};
    action.sa_handler = [](int signal) { interrupted = signal; };
    action.sa_flags = int(SA_RESETHAND | SA_RESTART);
    for (int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
    sigaction(SIGHUP, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);  // under nohup it stays ignored
}

std::string duration(double s) {
    const long whole = std::lround(s);
    char text[48];
    if (whole < 3600) std::snprintf(text, sizeof text, "%ldm%02lds", whole / 60, whole % 60);
    else std::snprintf(text, sizeof text, "%ldh%02ldm", whole / 3600, whole / 60 % 60);
    return text;
}

// Of a run, in its checkpoints: two runs in one folder are told apart by it.
std::string random_name() {
    std::random_device random;
    char text[17];
    std::snprintf(text, sizeof text, "%08x%08x", random(), random());
    return text;
}

// Of `ranks` consecutive micro-batches every rank has one. So all ranks together train on the micro-batches
// of one rank with a larger --accumulate.
struct Batch {  // (micro-batches, B, T) each
    std::vector<int32_t> tokens, targets;
    void fill(Loader& loader, int64_t micro_batches, int64_t tokens_each, int64_t rank, int64_t ranks) {
        tokens.resize(micro_batches * tokens_each), targets.resize(tokens.size());
        for (int64_t i = 0; i < micro_batches; i++) {
            loader.skip(rank);
            loader.next(&tokens[i * tokens_each], &targets[i * tokens_each]);
            loader.skip(ranks - 1 - rank);
        }
    }
};

class Training {
public:
    Training(Run& run, Model& model) : run_(run), model_(model) { train_.seek(state_.position); }

    // Returns the exit code. With --steps 0 it evaluates, and updates nothing. After an error, the last
    // complete step is saved, with these settings.
    int run() {
        Json settings = flags_.remembered();
        settings["accumulate"] = std::to_string(micro_batches_);  // a checkpoint knows nothing of ranks
        settings["train_tokens"] = run_.corpus->train.size();
        settings["train_hash"] = sampled_hash(run_.corpus->train);
        state_.settings = json_text(settings);
        if (state_.run.empty()) state_.run = random_name();
        // A new run replaces the log of an earlier one; a pipe has nothing to cut off. An evaluation appends.
        if (log_ && resumed_at_ == 0 && !run_.evaluates()) std::ignore = ::ftruncate(::fileno(log_.get()), 0);
        Json line = {{"kind", "settings"}, {"step", state_.step}};
        line["parameters"] = parameter_count(setup_.config);
        line.update(flags_.typed());
        line["ranks"] = setup_.ranks;
        log(line);
        if (run_.evaluates()) return sample(), validate(), print_quantization(), 0;
        const int64_t without = train_.windows_without_target();
        if (without == train_.windows())
            throw Error("No token of --data counts in the loss; write it again with data/tokenize.py.");
        if (without)
            std::printf("%ld of the %ld windows of --seq %ld to train on have no token that counts in the "
                        "loss (data/tokenize.py --seq %ld makes windows that have).\n",
                        without, train_.windows(), setup_.T, setup_.T);
        try {
            return loop();
        } catch (...) {
            try {
                if (unsaved_ && !setup_.processes) save();  // several ranks save together, or not at all
            } catch (const std::exception&) {  // the first error is the one to report
            }
            throw;
        }
    }

private:
    static constexpr int64_t VALIDATION_BATCHES = 20;
    static constexpr uint64_t VALIDATION_SEED = 0;  // all runs validate on the same windows
    static constexpr int MOST_SKIPPED = 20;         // steps in a row: then the run has diverged

    // The training loop. Returns the exit code.
    int loop() {
        if (state_.step == 0) validate(), state_.first_validation = state_.validation;
        started_ = now();
        while (state_.step < steps_) {
            // One optimizer step on all micro-batches.
            const double before = now();
            batch_.fill(train_, setup_.accumulate, batch_tokens_, setup_.rank, setup_.ranks);
            unsaved_ = false;  // an error within the step leaves weights of two steps
            const AdamW adamw = optimizer_settings();
            const StepResult result = model_.step(batch_.tokens.data(), batch_.targets.data(), adamw);
            count_step(result);
            print_step(result, adamw.lr, now() - before);
            if (skipped_in_a_row_ == MOST_SKIPPED)
                throw Error("The loss or a gradient was not finite in ", MOST_SKIPPED,
                            " steps in a row; begin again with a lower --lr, or from the weights of the last "
                            "checkpoint with --model and another --out.");

            // What comes after some of the steps. The last step is validated and saved after the loop.
            const bool last = state_.step == steps_,
                       saves = !last && every("save-every") && !skipped_in_a_row_;
            // A signal to one rank stops all of them after the same step.
            const std::vector<int> signals = run_.processes->all_gather(int(interrupted));
            const int signal = *std::max_element(signals.begin(), signals.end());
            if (signal && !last) return stop_early(signal);
            if (!last && (every("eval-every") || saves)) validate();  // a checkpoint is saved with its loss
            if (every("sample-every") || (last && flags_.count("sample-every"))) sample();
            if (saves) save();
        }
        validate();
        save();
        print_quantization();
        print_end();
        return 0;
    }

    // Whether this step is one of those after which the flag asks for something.
    bool every(const char* flag) const { return flags_.count(flag) && state_.step % flags_.count(flag) == 0; }

    // Skipped steps do not count for the bias correction, but for the schedule and stochastic rounding.
    AdamW optimizer_settings() {
        AdamW adamw{};
        adamw.step = state_.updates + 1;
        adamw.skipped = state_.step - state_.updates;
        adamw.lr = learning_rate(schedule_, flags_.real("lr"), flags_.count("warmup"), steps_, state_.step);
        adamw.weight_decay = float(flags_.real("weight-decay"));
        adamw.clip = float(flags_.real("clip"));
        return adamw;
    }

    // The position in the data goes on after a skipped step too: the same batch would be skipped again.
    void count_step(const StepResult& result) {
        state_.step++;
        state_.updates += !result.skipped;
        state_.tokens += step_tokens_;
        state_.position = train_.position();
        state_.validation = std::numeric_limits<double>::quiet_NaN();
        if (result.targets) skipped_in_a_row_ = result.skipped ? skipped_in_a_row_ + 1 : 0;
        unsaved_ = skipped_in_a_row_ < MOST_SKIPPED;
    }

    // A full disk does not end the run.
    void log(const Json& line) {
        if (!log_) return;
        if (std::fprintf(log_.get(), "%s\n", json_text(line).c_str()) >= 0 && std::fflush(log_.get()) == 0)
            return;
        std::fprintf(stderr,
                     "train: --log %s cannot be written any more (%s); the run continues without it.\n",
                     escaped(flags_.text("log")).c_str(), std::strerror(errno));
        log_.reset();
    }

    // took: seconds of this step. The time left also counts validations, samples and saves.
    void print_step(const StepResult& result, float lr, double took) {
        const int64_t done = state_.step - resumed_at_, skipped = state_.step - state_.updates;
        if (done > 1) timed_ += took;  // the first step warms caches and starts threads
        const double rate = step_tokens_ / took;
        const double left = (now() - started_) / done * (steps_ - state_.step);
        std::printf("step %*ld/%ld | loss %.4f | norm %.4f | lr %.3e | %.0f ms | %.0f tok/s | %s left",
                    int(std::to_string(steps_).size()), state_.step, steps_, result.loss, result.grad_norm,
                    lr, took * 1e3, rate, duration(left).c_str());
        if (result.skipped)
            std::printf(" | skipped: %s (%ld so far)", result.targets ? "not finite" : "no token counts",
                        skipped);
        std::printf("\n");
        log({{"kind", "step"}, {"step", state_.step}, {"loss", result.loss},
                    {"grad_norm", result.grad_norm}, {"lr", lr}, {"ms", took * 1e3},
                    {"tokens_per_second", rate}, {"skipped", result.skipped}});
    }

    // Mean loss over the targets that count in up to 20 batches of held-out windows, the same in every run.
    // The ranks share the batches out.
    void validate() {
        const int64_t windows = validation_.windows(), n = batch_tokens_;
        const int64_t batches = std::max<int64_t>(1, std::min(VALIDATION_BATCHES, windows / setup_.B));
        struct Part {       // of one batch
            double loss;    // mean over its targets that count
            double weight;  // part of its targets that counts
            int64_t bytes;  // of text that these stand for
        };
        double sum = 0, weight = 0;
        int64_t bytes = 0;
        Batch batch;
        for (int64_t first = 0; first < batches; first += setup_.ranks) {  // one batch for each rank
            validation_.seek({});
            validation_.skip(std::min(first + setup_.rank, batches - 1));
            batch.fill(validation_, 1, n, 0, 1);
            const int32_t* targets = batch.targets.data();
            const std::vector<Part> parts = run_.processes->all_gather(
                Part{model_.evaluate(batch.tokens.data(), targets), double(counted_targets(targets, n)) / n,
                     run_.corpus->vocabulary.text_bytes(targets, n)});
            for (int64_t i = 0; i < std::min<int64_t>(setup_.ranks, batches - first); i++) {
                sum += parts[i].loss * parts[i].weight;
                weight += parts[i].weight, bytes += parts[i].bytes;
            }
        }
        if (weight == 0)
            throw Error("No token of the held-out --data counts in the loss; give other data, or the --seq "
                        "that data/tokenize.py had.");
        unsaved_ &= std::isfinite(sum);
        if (!std::isfinite(sum) && state_.step)
            throw Error("The validation loss is not finite after step ", state_.step,
                        "; begin again with a lower --lr.");
        if (!std::isfinite(sum))
            throw Error("The first validation loss is not finite: activations overflow with --model ",
                        flags_.text("model"), "; choose other weights.");
        state_.validation = sum / weight;
        std::printf("validation | step %ld | loss %.4f", state_.step, state_.validation);
        Json line = {{"kind", "validation"}, {"step", state_.step}, {"loss", state_.validation}};
        if (run_.evaluates()) {
            line["perplexity"] = std::exp(state_.validation);
            std::printf(" | perplexity %.4g", std::exp(state_.validation));
        }
        if (run_.evaluates() && bytes > 0) {
            line["bits_per_byte"] = sum * n / std::log(2.0) / bytes;
            std::printf(" | %.4f bits per byte", line["bits_per_byte"].get<double>());
        }
        std::printf("\n");
        log(line);
    }

    // Continues the prompt. Each token costs a whole forward pass: nothing is cached between them. The seed
    // follows from the step, so a resumed run prints the samples of one that was not stopped.
    void sample() {
        constexpr size_t LENGTH = 256;  // tokens of the prompt and the sample together, if --seq has room
        constexpr size_t LEAST = 64;    // tokens of the sample after a long prompt, likewise
        std::vector<int32_t> tokens = run_.prompt.tokens;
        const size_t first = tokens.size(), end = std::min(size_t(setup_.T), std::max(LENGTH, first + LEAST));
        if (tokens.empty()) return;
        uint64_t random = setup_.seed * 0x9E3779B97F4A7C15ull + uint64_t(state_.step);
        std::vector<float> logits(setup_.config.V);
        const double before = now();
        while (tokens.size() < end) {
            model_.next_logits(tokens.data(), tokens.size(), logits.data());
            tokens.push_back(draw(logits, flags_.real("temperature"), &random));
        }
        std::printf("sample | step %ld | %.2f ms per token\n----------\n%s\n----------\n", state_.step,
                    (now() - before) / (end - first) * 1e3,
                    printable(run_.prompt.vocabulary.decode(tokens), Lines::Many).c_str());
        log({{"kind", "sample"}, {"step", state_.step}, {"tokens", tokens}});
    }

    // Every rank calls it, because each sends what it keeps to rank 0, which writes.
    void save() {
        unsaved_ = false;
        if (flags_.text("out").empty()) return;
        // Weights of a skipped step must not replace a good checkpoint.
        const bool suspect = skipped_in_a_row_ && !run_.last_good.empty();
        if (!suspect) run_.last_good = save_checkpoint(flags_.text("out"), model_, state_, run_.companions);
        std::printf(suspect ? "not saved: step %ld was skipped; the last good checkpoint stays | %s\n"
                            : "saved | step %ld | %s\n",
                    state_.step, printable(run_.last_good).c_str());
    }

    // Returns the exit code that shells expect after a signal.
    int stop_early(int signal) {
        save();
        const std::string next = ": continue with ./train --resume " + for_shell(flags_.text("out"));
        std::printf("Interrupted after step %ld%s\n", state_.step,
                    run_.last_good.empty() ? "; nothing was saved, because --out is empty."
                                           : printable(next).c_str());
        return 128 + signal;
    }

    // The speed is that of all steps but the first; of one step it is that of the whole run.
    void print_end() {
        const int64_t steps = state_.step - resumed_at_, skipped = state_.step - state_.updates;
        const double took = now() - started_;
        const double rate = steps > 1 ? step_tokens_ * (steps - 1) / timed_ : step_tokens_ / took;
        std::printf("\nDone: %ld steps in %s, %.0f tok/s; %ld skipped. "
                    "Validation loss %.4f -> %.4f nats per token.\n",
                    steps, duration(took).c_str(), rate, skipped, state_.first_validation, state_.validation);
        log({{"kind", "end"}, {"step", state_.step}, {"first_validation", state_.first_validation},
                    {"validation", state_.validation}, {"skipped", skipped}, {"seconds", took},
                    {"tokens_per_second", rate}});
    }

    // How well FP8 represents each kind of tensor: measured on one validation batch, forward and backward,
    // and on the moments that its gradients would lead to; and the expansion factors k in use.
    void print_quantization() {
        validation_.seek({});
        Batch batch;
        batch.fill(validation_, 1, batch_tokens_, 0, 1);  // the same one on every rank
        QuantReport report = model_.quantization(batch.tokens.data(), batch.targets.data());
        merge_moments(report, setup_);
        const auto nothing = [](const QuantStats& s) { return s.elements == 0; };
        if (std::all_of(std::begin(report.kinds), std::end(report.kinds), nothing)) return;
        std::printf("\n%-17s | SNR      | quantized   | saturated | flushed to zero\n", "Quantization");
        for (size_t kind = 0; kind < std::size(report.kinds); kind++) {
            const QuantStats& s = report.kinds[kind];
            if (nothing(s)) continue;
            std::printf("%-17s | %5.1f dB | %11ld | %9ld | %ld (%.3f%%)\n", KIND_NAMES[kind], s.snr_db(),
                        s.elements, s.saturated, s.flushed, 100.0 * s.flushed / s.elements);
        }
        for (const auto& [name, k] :
             {std::pair{"first moments", &report.k_m}, {"second moments", &report.k_v}}) {
            if (k->empty()) continue;
            auto at = [&, of = k](double part) { return (*of)[size_t(part * (of->size() - 1))]; };
            std::printf("expansion factor k of %s: smallest %.2f, quartiles %.2f %.2f %.2f, largest %.2f\n",
                        name, at(0), at(0.25), at(0.5), at(0.75), at(1));
        }
    }

    Run& run_;
    Model& model_;
    const Flags& flags_ = run_.flags;
    LoopState& state_ = run_.state;
    const Schedule& schedule_ = find_row(schedules(), flags_.text("schedule"), "--schedule");
    const Setup& setup_ = model_.setup();
    const int64_t resumed_at_ = state_.step, steps_ = flags_.count("steps");
    const int64_t micro_batches_ = setup_.accumulate * setup_.ranks;  // of a step, on all ranks
    const int64_t batch_tokens_ = setup_.B * setup_.T, step_tokens_ = micro_batches_ * batch_tokens_;
    Loader train_{run_.corpus->train, setup_.B, setup_.T, setup_.seed};
    Loader validation_{run_.corpus->validation, setup_.B, setup_.T, VALIDATION_SEED};
    Batch batch_;
    Log& log_ = run_.log;
    bool unsaved_ = false;  // the model is complete, finite as far as is known, and in no checkpoint
    double started_ = 0, timed_ = 0;
    int skipped_in_a_row_ = 0;
};

// -----------------------------------------------------------------------------------------------------------
// From the command line to the exit code

// Files and flags are checked before the model is made, which can take minutes.
int train(Run& run) {
    const Setup& setup = run.setup;
    if (!run.checkpoint.empty()) check_checkpoint(run.checkpoint);
    if (!run.weights.empty()) check_weights(run.weights, setup.config);
    if (!run.weights.empty() && run.lock) run.companions = read_companions(run.weights);
    // Under a launcher --ranks is 1; then the last rank of this host counts all of them.
    const int64_t ranks_here = std::max<int64_t>(run.flags.count("ranks"), run.processes->local() + 1);
    if (!run.gpu()) require_memory(setup, ranks_here);
    run.prompt = choose_prompt(run);
    const std::string& log = run.flags.text("log");
    if (!log.empty() && setup.rank == 0) run.log.reset(open_log(log));
    const std::unique_ptr<Model> model = run.gpu() ? make_gpu(setup) : make_reference(setup);
    if (!run.checkpoint.empty()) load_checkpoint(run.checkpoint, *model);
    else if (!run.weights.empty()) load_weights(run.weights, *model);
    Training training(run, *model);
    if (run.lock) require_space(run);
    if (!run.evaluates()) finish_step_at_interrupt();  // an evaluation has no step to finish
    return training.run();
}

// The stages of a run: flags, checkpoint, data, plan, and in train() the model and the loop. Flags are
// completed in five steps: from the command line, the checkpoint, the device's defaults, the recipe, and the
// model, which limits --seq.
// `processes` belongs to main(), which after an error tells the other ranks of it.
int run(int argc, char** argv, std::unique_ptr<ProcessGroup>& processes) {
    // The command line, and the other ranks.
    Run run;
    Flags& flags = run.flags;
    Setup& setup = run.setup;
    std::exception_ptr wrong_flags;  // the other ranks hear of it, too
    try {
        flags.parse(argc, argv);
    } catch (const Error&) {
        wrong_flags = std::current_exception();
    }
    const Launch launch = find_launch(!wrong_flags && flags.given("ranks") ? flags.count("ranks") : 0);
    if (launch.rank && !std::freopen("/dev/null", "w", stdout)) ::close(1);  // rank 0 alone prints
    const bool help = flags.given("help"), several = launch.ranks > 1 && !run.plan_only() && !help;
    processes = std::make_unique<ProcessGroup>(several ? launch : Launch(), argv);
    if (wrong_flags) std::rethrow_exception(wrong_flags);
    if (help) return print_help(), 0;
    run.processes = processes.get();
    setup.ranks = launch.ranks;
    setup.rank = launch.rank;
    setup.processes = several ? processes.get() : nullptr;

    // The checkpoint, the device, the rows of the tables.
    choose_checkpoint(run);
    choose_device(run, launch.local);
    flags.take_defaults(run.gpu());
    choose_rows(flags, setup);
    for (const Flag& flag : flag_table())
        if (flag.resume != Resume::Ignore) require_same_flag(*processes, flag.name, flags.text(flag.name));
    require_same_flag(*processes, "resume", flags.text("resume"));
    require_same_flag(*processes, "device", run.device);
    choose_model(run);
    if (!run.plan_only() && !run.evaluates() && flags.count("steps") <= run.state.step)
        throw Error("--steps ", flags.text("steps"), " is already done: the checkpoint is at step ",
                    run.state.step, "; give a larger --steps to continue.");
    require_no_other_run(run);

    // The data, and the sizes.
    if (!run.plan_only() || (setup.config.V == 0 && flags.given("data")))
        run.corpus = std::make_unique<Corpus>(load_corpus(flags.text("data")));
    choose_vocabulary(setup.config, run.corpus.get());
    if (!flags.given("seq") && run.checkpoint.empty())
        flags.set("seq", std::to_string(std::min(flags.count("seq"), setup.config.longest())));
    setup.B = flags.count("batch");
    setup.T = flags.count("seq");
    setup.accumulate = flags.count("accumulate");
    setup.seed = uint64_t(flags.count("seed"));
    validate(setup);
    require_same_run(run);
    if (run.corpus) require_same_data(*processes, *run.corpus);

    // The plan.
    print_precision_plan(setup);
    Setup most = setup;  // the last rank keeps most
    most.rank = setup.ranks - 1;
    print_memory_plan(most);
    if (run.plan_only() && flags.text("plan") == "full") print_buffers(setup);
    print_settings(run);
    if (run.plan_only()) {
        for (const std::string& reason : {why_unsupported(setup.optimizer), why_unsupported(setup.recipe)})
            if (!reason.empty()) std::printf("On a GPU this is an error: %s\n", reason.c_str());
        return 0;
    }
    print_start(run);
    try {
        return train(run);
    } catch (const std::bad_alloc&) {
        const std::string needed = concat(": this run needs ", cpu_memory(setup) >> 20, " MiB and workspace");
        throw Error("The machine's memory ran out", run.gpu() ? "" : needed,
                    "; close other programs, or choose a smaller --model, --batch, --seq or --accumulate.");
    }
}

// GNU's OpenMP spins at the end of every parallel loop unless it is told otherwise before main. On a machine
// with other work, a step then takes several times as long. So the program starts itself again with the
// setting; if that fails, it goes on.
void wait_without_spinning(char** argv) {
    if (std::getenv("OMP_WAIT_POLICY")) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);
}

// If stdin, stdout or stderr is closed, the next file that is opened, say a log, would get its number and
// what is printed.
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
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // each line appears at once, also in a pipe or a file
    std::signal(SIGXFSZ, SIG_IGN);  // beyond the limit on file sizes a write fails, and gets a message
    std::signal(SIGPIPE, SIG_IGN);  // the run continues when the reader of its output ends
    rlimit files{};
    if (getrlimit(RLIMIT_NOFILE, &files) == 0)
        files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);  // token files stay open
    std::unique_ptr<ProcessGroup> processes;
    std::string sentence;
    try {
        return run(argc, argv, processes);
    } catch (const Error& error) {
        sentence = error.what();
    } catch (const fs::filesystem_error& error) {
        sentence = escaped(error.path1().string()) + " cannot be used (" + error.code().message() +
                   "); check its path and permissions.";
    } catch (const std::bad_alloc&) {
        sentence = "The memory ran out while the data was read; give --data less text.";
    } catch (const std::exception& error) {
        sentence = std::string("A system call failed (") + error.what() +
                   "); check the limits that ulimit -a lists.";
    }
    // Most errors are those of all ranks. Then rank 0 is the one that reports it, and ends the others.
    if (processes && processes->rank()) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    if (processes) processes->fail(sentence);
    print_error(sentence);
    return 1;
}
