// train.cpp - the program: flags in, a trained model out.
//
// In the order of a run: what it is made of (Run), what happens between steps, the training loop, and the
// stages before it: flags, checkpoint, model, data. This file knows models through model.h's Model, files
// through data/, the command line through flags.h. It contains no CUDA and no file format.
#include "flags.h"

#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "../data/checkpoint.h"
#include "../data/tokens.h"
#include "model.h"
#include "plan.h"
#include "ranks.h"

namespace {

using namespace coat;
namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// What a run is made of; run_program() completes it stage by stage.
struct Run {
    Flags flags;
    Setup setup{};
    ProcessGroup* processes = nullptr;  // all ranks, also if there is only this one
    std::string weights;     // the folder that the run starts from, or continues; empty: random weights
    std::string checkpoint;  // the last one of this run; empty: there is none
    LoopState state;
    Companions companions;  // of `weights`, for the checkpoints
    Corpus corpus;
    Json data;  // how many tokens it has, and their hashes
    std::unique_ptr<Model> model;
    std::ofstream log;
    std::vector<int32_t> tokens, targets;  // of a step: (accumulate, B, T)
    bool unsaved = false;  // the model is complete, finite as far as is known, and in no checkpoint

    int64_t batch_tokens() const { return setup.B * setup.T; }
    int64_t micro_batches() const { return setup.accumulate * setup.ranks; }  // of a step, on all ranks

    // A log on a full disk does not end the run.
    void print_log(const Json& line) {
        if (!log.is_open()) return;
        log << line.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
        if (log) return;
        print_error("--log " + flags.log + " cannot be written any more; the run continues without it.");
        log.close();
    }

    // Puts micro-batch `number` of a loader at a place of the batch.
    void fill(const Loader& loader, int64_t place, int64_t number) {
        const int64_t n = batch_tokens();
        tokens.resize((place + 1) * n), targets.resize(tokens.size());
        loader.read(number, &tokens[place * n], &targets[place * n]);
        require_tokens(setup.config, &tokens[place * n], &targets[place * n], n);
    }
};

// The length of a minute in seconds. Tests make it shorter, because no test can wait for half an hour.
double minute() {
    const char* const text = std::getenv("COAT_MINUTE");
    return text ? std::atof(text) : 60;
}

std::string duration(double seconds) {
    const int64_t whole = std::llround(seconds);
    char text[48];
    if (whole < 3600) std::snprintf(text, sizeof text, "%ldm%02lds", whole / 60, whole % 60);
    else std::snprintf(text, sizeof text, "%ldh%02ldm", whole / 3600, whole / 60 % 60);
    return text;
}

// -----------------------------------------------------------------------------------------------------------
// What happens between steps. Every rank calls these functions; rank 0 alone prints, logs and saves.

// Mean loss over the targets that count in up to 20 batches of held-out windows, the same in every run. The
// ranks share the batches out.
double validate(Run& run) {
    constexpr int64_t MOST_BATCHES = 20;
    constexpr uint64_t SEED = 0;
    const Setup& s = run.setup;
    const Loader held_out(run.corpus.validation, s.B, s.T, SEED);
    const int64_t batches = std::clamp<int64_t>(held_out.windows() / s.B, 1, MOST_BATCHES);
    struct Part {  // of one batch
        double loss, targets;
    };
    double loss = 0, targets = 0;
    for (int64_t first = 0; first < batches; first += s.ranks) {  // one batch for each rank
        run.fill(held_out, 0, std::min(first + s.rank, batches - 1));
        const double counted = double(counted_targets(run.targets.data(), run.batch_tokens()));
        const double mean = run.model->evaluate(run.tokens.data(), run.targets.data());
        const std::vector<Part> parts = run.processes->all_gather(Part{mean * counted, counted});
        for (int64_t r = 0; r < std::min(s.ranks, batches - first); r++)
            loss += parts[r].loss, targets += parts[r].targets;
    }
    if (targets == 0)
        throw Error(
            "No token of the held-out --data counts in the loss; give other data, or the --seq that "
            "data/tokenize.py had.");
    loss /= targets;
    run.unsaved &= std::isfinite(loss);
    if (!std::isfinite(loss))
        throw Error("The validation loss is not finite after step ", run.state.step, "; begin again with ",
                    run.state.step ? "a lower --lr." : "other weights: these overflow.");
    std::printf("validation | step %ld | loss %.4f\n", run.state.step, loss);
    run.print_log({{"kind", "validation"}, {"step", run.state.step}, {"loss", loss}});
    return loss;
}

// Continues the beginning of the held-out text, if --seq has room. Each token costs a whole forward pass:
// nothing is cached between them. The seed follows from the step, so a resumed run prints the samples of one
// that was not stopped.
void sample(Run& run) {
    constexpr int64_t PROMPT = 16, LENGTH = 256;
    constexpr float TEMPERATURE = 0.8f;
    std::vector<int32_t> tokens(PROMPT), unused(PROMPT);
    run.corpus.validation.read(0, PROMPT, tokens.data(), unused.data());
    std::vector<float> logits(run.setup.config.V);
    std::mt19937_64 random(run.setup.seed * 1'000'003 + run.state.step);
    while (int64_t(tokens.size()) < std::min(run.setup.T, LENGTH)) {
        run.model->next_logits(tokens.data(), int64_t(tokens.size()), logits.data());
        const float top = *std::max_element(logits.begin(), logits.end());
        for (float& logit : logits) logit = std::exp((logit - top) / TEMPERATURE);
        tokens.push_back(std::discrete_distribution<int32_t>(logits.begin(), logits.end())(random));
    }
    if (tokens.size() == PROMPT) return;
    std::printf("sample | step %ld\n----------\n%s\n----------\n", run.state.step,
                printable(run.corpus.decode(tokens), "\n\t").c_str());
    run.print_log({{"kind", "sample"}, {"step", run.state.step}, {"tokens", tokens}});
}

// Returns whether it was saved. Where it was not, say on a full disk, the run goes on, and the last
// checkpoint stays. All ranks get the same answer.
bool save(Run& run) {
    if (run.flags.out.empty()) return true;
    try {
        run.checkpoint =
            save_checkpoint(run.flags.out, *run.model, run.state, run.companions, run.flags.keep);
    } catch (const Error& error) {
        if (run.setup.rank == 0)
            print_error(concat("Step ", run.state.step, " was not saved: ", error.what()));
        return false;
    }
    run.unsaved = false;
    std::printf("saved | step %ld | %s\n", run.state.step, printable(run.checkpoint).c_str());
    return true;
}

// Of several ranks, each has measured the moments that it keeps: adds their counts, joins their factors k.
void merge_moments(QuantReport& report, const Run& run) {
    for (Kind kind : {Kind::Moment1, Kind::Moment2}) {
        QuantStats sum;
        for (const QuantStats& s : run.processes->all_gather(report.kinds[int(kind)])) sum += s;
        report.kinds[int(kind)] = sum;
    }
    for (std::vector<float>* k : {&report.k_m, &report.k_v}) {
        std::vector<float> all;
        for (const std::vector<float>& theirs : run.processes->all_gather(*k))
            all.insert(all.end(), theirs.begin(), theirs.end());
        std::sort(all.begin(), all.end());
        *k = all;
    }
}

// How well FP8 represents each kind of tensor: measured on one validation batch, forward and backward, and on
// the moments that its gradients would lead to; and the expansion factors k in use.
void print_quantization(Run& run) {
    const Loader held_out(run.corpus.validation, run.setup.B, run.setup.T, 0);
    run.fill(held_out, 0, 0);  // the same batch on every rank
    QuantReport report = run.model->quantization(run.tokens.data(), run.targets.data());
    merge_moments(report, run);
    const auto nothing = [](const QuantStats& s) { return s.elements == 0; };
    if (std::all_of(std::begin(report.kinds), std::end(report.kinds), nothing)) return;
    std::printf("\n%-17s | SNR      | quantized   | saturated | flushed to zero\n", "Quantization");
    for (size_t kind = 0; kind < std::size(report.kinds); kind++) {
        const QuantStats& s = report.kinds[kind];
        if (nothing(s)) continue;
        std::printf("%-17s | %5.1f dB | %11ld | %9ld | %ld (%.3f%%)\n", KIND_NAMES[kind], s.snr_db(),
                    s.elements, s.saturated, s.flushed, 100.0 * s.flushed / s.elements);
    }
    if (report.part_of_moments) std::printf("Of large parameters, a part of the moments was measured.\n");
    for (const auto& [name, k] : {std::pair{"first moments", &report.k_m}, {"second moments", &report.k_v}}) {
        if (k->empty()) continue;
        auto at = [&, of = k](double part) { return (*of)[size_t(part * (of->size() - 1))]; };
        std::printf("expansion factor k of %s: smallest %.2f, quartiles %.2f %.2f %.2f, largest %.2f\n", name,
                    at(0), at(0.25), at(0.5), at(0.75), at(1));
    }
}

// -----------------------------------------------------------------------------------------------------------
// The training loop. Every rank goes through it.

// What all ranks must agree upon: a signal to one rank stops all of them after the same step, and the clock
// of rank 0 says when a checkpoint is due.
struct Agreed {
    int signal;
    bool due;
};
Agreed agree(const Run& run, bool due = false) {
    const std::vector<Agreed> all = run.processes->all_gather(Agreed{interrupted, due});
    const auto later = [](const Agreed& a, const Agreed& b) { return a.signal < b.signal; };
    return {std::max_element(all.begin(), all.end(), later)->signal, all[0].due};
}

// The last save of a run: if it fails, it is tried again every minute until it succeeds or a signal comes.
// Returns the exit code.
int save_last(Run& run) {
    while (!save(run)) {
        print_error("The run tries again every minute; Ctrl-C ends it.");
        usleep(useconds_t(minute() * 1e6));  // until a signal comes
        if (const int signal = agree(run).signal) return 128 + signal;
    }
    return 0;
}

// Weights after a skipped step may have overflowed: they must not replace a good checkpoint. Returns the exit
// code that shells expect after a signal.
int stop_early(Run& run, int signal, bool skipped) {
    if (skipped && !run.checkpoint.empty())
        std::printf("Step %ld was skipped; the last good checkpoint stays.\n", run.state.step);
    else interrupted = 0, save_last(run);
    if (run.checkpoint.empty())
        std::printf("Interrupted after step %ld; nothing was saved.\n", run.state.step);
    else
        std::printf("Interrupted after step %ld: continue with --resume %s\n", run.state.step,
                    printable(run.flags.out).c_str());
    return 128 + signal;
}

// One optimizer step on all micro-batches. Of `ranks` consecutive micro-batches every rank has one. So all
// ranks together train on the micro-batches of one rank with a larger --accumulate.
StepResult train_step(Run& run, const Loader& loader, float lr) {
    const Setup& s = run.setup;
    for (int64_t i = 0; i < s.accumulate; i++)
        run.fill(loader, i, run.state.step * run.micro_batches() + i * s.ranks + s.rank);
    AdamW adamw{run.state.updates + 1, lr};
    adamw.skipped = run.state.step - run.state.updates;
    adamw.weight_decay = float(run.flags.weight_decay);
    adamw.clip = float(run.flags.clip);
    run.unsaved = false;  // an error within the step leaves weights of two steps
    return run.model->step(run.tokens.data(), run.targets.data(), adamw);
}

// took: seconds of this step. left: of the run; it also counts validations, samples and saves.
void print_step(Run& run, const StepResult& result, float lr, double took, double left) {
    const double rate = run.micro_batches() * run.batch_tokens() / took;
    std::printf("step %*ld/%ld | loss %.4f | norm %.4f | lr %.3e | %.0f ms | %.0f tok/s | %s left%s\n",
                int(std::to_string(run.flags.steps).size()), run.state.step, run.flags.steps, result.loss,
                result.grad_norm, lr, took * 1e3, rate, duration(left).c_str(),
                !result.skipped  ? ""
                : result.targets ? " | skipped: not finite"
                                 : " | skipped: no token counts");
    run.print_log({{"kind", "step"},
                   {"step", run.state.step},
                   {"loss", result.loss},
                   {"grad_norm", result.grad_norm},
                   {"lr", lr},
                   {"ms", took * 1e3},
                   {"tokens_per_second", rate},
                   {"skipped", result.skipped}});
}

// Returns the exit code.
int loop(Run& run) {
    constexpr int MOST_SKIPPED = 20;  // steps in a row: then the run has diverged
    const Flags& flags = run.flags;
    LoopState& state = run.state;
    const Loader loader(run.corpus.train, run.setup.B, run.setup.T, run.setup.seed);
    const int64_t resumed_at = state.step;
    auto every = [&](int64_t steps) { return steps && state.step % steps == 0; };
    if (state.step == 0) state.first_validation = validate(run);
    const double started = now();
    double timed = 0, saved_at = started;  // timed: all steps but the first, which warms caches
    int skipped_in_a_row = 0;
    while (state.step < flags.steps) {
        const double before = now();
        const float lr = learning_rate(flags.lr, flags.warmup, flags.steps, state.step);
        const StepResult result = train_step(run, loader, lr);
        // A skipped step counts for the schedule and the data, or the same batch would be skipped again. It
        // does not for the bias correction.
        state.step++, state.updates += !result.skipped;
        if (result.targets) skipped_in_a_row = result.skipped ? skipped_in_a_row + 1 : 0;
        run.unsaved = skipped_in_a_row < MOST_SKIPPED;
        const double took = now() - before, steps = state.step - resumed_at;
        if (steps > 1) timed += took;
        print_step(run, result, lr, took, (now() - started) / steps * (flags.steps - state.step));
        if (skipped_in_a_row == MOST_SKIPPED)
            throw Error("The loss or a gradient was not finite in ", MOST_SKIPPED,
                        " steps in a row; begin again with a lower --lr, or from the weights of the last "
                        "checkpoint with --model and another --out.");

        // What comes after some of the steps. The last step is validated and saved after the loop.
        const bool last = state.step == flags.steps;
        const auto [signal, due] = agree(run, now() - saved_at >= 30 * minute());
        if (signal && !last) return stop_early(run, signal, skipped_in_a_row > 0);
        if (!last && every(flags.eval_every)) validate(run);
        if (every(flags.sample_every) || (last && flags.sample_every)) sample(run);
        // Without --save-every about every half hour.
        if (!last && !skipped_in_a_row && (flags.save_every ? every(flags.save_every) : due))
            save(run), saved_at = now();
    }
    const double validation = validate(run);
    const int code = save_last(run);
    print_quantization(run);
    const int64_t steps = state.step - resumed_at, skipped = state.step - state.updates;
    const double step_tokens = run.micro_batches() * run.batch_tokens(), seconds = now() - started;
    const double rate = steps > 1 ? step_tokens * (steps - 1) / timed : step_tokens / seconds;
    std::printf(
        "\nDone: %ld steps in %s, %.0f tok/s; %ld skipped. Validation loss %.4f -> %.4f nats per token.\n",
        steps, duration(seconds).c_str(), rate, skipped, state.first_validation, validation);
    run.print_log({{"kind", "end"},
                   {"step", state.step},
                   {"first_validation", state.first_validation},
                   {"validation", validation},
                   {"skipped", skipped},
                   {"seconds", seconds},
                   {"tokens_per_second", rate}});
    return code;
}

// After an error the last complete step is saved.
int loop_and_save(Run& run) {
    try {
        return loop(run);
    } catch (...) {
        if (run.unsaved && !run.setup.processes) save(run);  // several ranks save together, or not at all
        throw;
    }
}

// -----------------------------------------------------------------------------------------------------------
// The stages of a run before the loop

// Two runs would remove each other's checkpoints. The folder stays open, and so locked, until the program
// ends. (Some file systems have no locks; then nothing is locked.)
void lock_folder(const std::string& out) {
    create_folders(out);
    const int folder = ::open(out.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0 || ::access(out.c_str(), R_OK | W_OK | X_OK) != 0)
        throw Error("--out ", out, " cannot be written (", std::strerror(errno),
                    "); choose another folder, or \"\" to save nothing.");
    if (::flock(folder, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        throw Error("--out ", out, " is the folder of another run that is going on; choose another folder.");
}

std::string folder_above(const std::string& path) {
    const fs::path whole = fs::absolute(path).lexically_normal();
    return (whole.has_filename() ? whole : whole.parent_path()).parent_path().string();  // "out/step-3/"
}

// Rank 0 alone looks at --out and chooses the checkpoint to continue; it tells the others. A new run must not
// use the folder of another run's checkpoints.
void choose_checkpoint(Run& run) {
    Flags& flags = run.flags;
    if (flags.given("resume") && flags.resume.empty())
        throw Error("--resume is empty; name a checkpoint, or a folder of them.");
    const bool resumes = !flags.resume.empty(), evaluates = flags.given("steps") && flags.steps == 0;
    if (run.processes->rank() == 0) {
        if (resumes) run.weights = find_checkpoint(flags.resume);
        if (resumes && run.weights.empty())
            throw Error("--resume ", flags.resume,
                        " has no complete checkpoint; give a folder that a run wrote.");
        if (resumes && !flags.given("out")) flags.out = folder_above(run.weights);
        const bool saves = !flags.out.empty() && !flags.plan && !evaluates;
        if (saves) lock_folder(flags.out);
        if (resumes) run.weights = find_checkpoint(flags.resume);  // again, now under the lock
        const std::string newest = saves ? find_checkpoint(flags.out) : "";
        if (!newest.empty() && resumes && fs::equivalent(newest, run.weights)) run.checkpoint = newest;
        else if (!newest.empty())
            throw Error("--out ", flags.out, " already holds the checkpoint ", newest, "; continue it with ",
                        "--resume ", flags.out, ", or choose another folder with --out.");
    }
    for (std::string* chosen : {&flags.out, &run.weights, &run.checkpoint})
        *chosen = run.processes->all_gather(*chosen).front();
}

// The settings of the checkpoint's run. A flag that is given here comes before its setting. The micro-batches
// of a step, of all ranks together, are divided among the present ranks.
void take_checkpoint(Run& run) try {
    Flags& flags = run.flags;
    run.state = read_loop_state(run.weights);
    Json settings = run.state.settings;
    const int64_t all = settings.at("accumulate"), ranks = run.setup.ranks;
    if (all % ranks)
        throw Error("The run has ", all, " micro-batches a step, which ", ranks,
                    " ranks cannot share; use a number of ranks that divides ", all, ".");
    if (flags.given("accumulate") && flags.accumulate * ranks != all)
        throw Error(
            "--accumulate ", flags.accumulate, " on ", ranks, " ranks differs from the checkpoint's ", all,
            " micro-batches a step; leave it out to continue that run, or leave --resume out to begin "
            "another.");
    settings["accumulate"] = all / ranks;
    flags.take(settings);
    if (flags.steps && !flags.plan && flags.steps <= run.state.step)
        throw Error("--steps ", flags.steps, " is already done: the checkpoint is at step ", run.state.step,
                    "; give a larger --steps to continue.");
} catch (const nlohmann::json::exception& error) {
    throw Error("--resume ", run.weights, " has other settings in its trainer.json than this program (",
                error.what(), "); start from its weights with --model.");
}

// Which of these names the value of a flag is.
int64_t choose(const char* flag, const std::string& value, std::initializer_list<const char*> names) {
    struct Row {
        const char* name;
    };
    std::vector<Row> rows;
    for (const char* name : names) rows.push_back({name});
    return &find_row(rows, value, flag) - rows.data();
}

// The rows of the tables that the flags choose; Error if there is no such row. What a flag left open is
// written into it.
void make_setup(Run& run) {
    Flags& flags = run.flags;
    Setup& s = run.setup;
    s.recipe = find_row(recipes(), flags.recipe, "--recipe");
    if (flags.optimizer.empty()) flags.optimizer = s.recipe.optimizer;
    s.optimizer = find_row(optimizers(), flags.optimizer, "--optimizer");
    if (choose("--attention", flags.attention, {"compute", "groups"}) == 1) s.recipe.attention = Q_GROUP;
    s.master = choose("--master", flags.master, {"exact", "none"}) == 0;
    s.keep_gradients = choose("--gradients", flags.gradients, {"kept", "none"}) == 0;
    if (!s.keep_gradients && flags.clip > 0)
        throw Error(
            "--gradients none updates weights before the norm of all gradients is known, so it cannot "
            "clip; give --clip 0.");
    // A run that continues has the shape of its checkpoint.
    if (run.weights.empty()) {
        const bool folder = fs::is_directory(flags.model);
        const auto& table = models();
        const bool named =
            std::any_of(table.begin(), table.end(), [&](auto& c) { return c.name == flags.model; });
        if (named && folder)
            throw Error("--model ", flags.model, " is a named model and also a folder here; write ./",
                        flags.model, " for the folder, or rename it.");
        if (folder) run.weights = flags.model;
        else if (!named)
            throw Error("--model ", flags.model,
                        " is neither a folder nor a named model; ./train --help lists the names.");
    }
    s.config =
        run.weights.empty() ? find_row(models(), flags.model, "--model") : read_model_config(run.weights);
    s.B = flags.batch, s.accumulate = flags.accumulate, s.seed = uint64_t(flags.seed);
}

// A model without a vocabulary size takes that of the data; --plan without data takes that of bytes. Without
// --seq it is that of packed conversations, or the default if the model can have it.
void load_data(Run& run) {
    Flags& flags = run.flags;
    ModelConfig& config = run.setup.config;
    const bool needed = !flags.plan || (config.V == 0 && flags.given("data"));
    if (needed) run.corpus = load_corpus(flags.data);
    int64_t in_use = 0;
    for (const auto& [name, stream] :
         {std::pair{"train", &run.corpus.train}, {"held out", &run.corpus.validation}}) {
        const TokenStream::Facts facts = stream->facts();
        run.data[name] = concat(stream->size(), " tokens, hash ", facts.hash);
        in_use = std::max(in_use, facts.largest + 1);
    }
    if (config.V == 0) config.V = needed ? std::max(in_use, int64_t(run.corpus.vocabulary.size())) : 256;
    if (in_use > std::min(config.V, MAX_VOCABULARY))
        throw Error("--data contains token ", in_use - 1, ", but the vocabulary of ", config.name, " has ",
                    config.V,
                    " tokens; make the token files with this model's tokenizer (data/tokenize.py).");
    const int64_t packed = run.corpus.seq;
    if (!flags.given("seq") && flags.resume.empty())
        flags.seq = packed ? packed : std::min(flags.seq, config.longest());
    if (packed && packed != flags.seq)
        throw Error("--data has conversations in windows of ", packed, " tokens, but --seq is ", flags.seq,
                    "; give --seq ", packed, ", or make them again with data/tokenize.py --seq ", flags.seq,
                    ".");
    run.setup.T = flags.seq;
}

// Ranks of one machine read the same files. Those of several may find others in a folder of the same name,
// and each would train a part of another model: the first rank of each machine compares their hashes.
std::map<std::string, std::string> hashes_of_weights(const Run& run) {
    const std::vector<int> places = run.processes->all_gather(run.processes->local());
    const bool several = std::count(places.begin(), places.end(), 0) > 1;
    std::map<std::string, std::string> hashes;
    if (run.weights.empty() || !several || run.processes->local() != 0) return hashes;
    for (const auto& file : fs::directory_iterator(run.weights))
        if (file.is_regular_file()) hashes[file.path().filename().string()] = hash_file(file.path().string());
    return hashes;
}

// What every rank must have, and every run that continues this one: other flags or data would change what the
// state means.
void require_same(Run& run) {
    Json mine = run.flags.saved();
    mine["resume"] = run.flags.resume;
    mine["device"] = run.flags.device;
    mine["data_found"] = run.data;
    mine["weights_found"] = hashes_of_weights(run);
    const std::vector<std::string> all = run.processes->all_gather(mine.dump());
    for (size_t rank = 1; rank < all.size(); rank++) {
        const Json theirs = Json::parse(all[rank]), first = Json::parse(all[0]);
        for (const auto& [name, value] : first.items()) {
            // A rank that shares its machine with an earlier one has not hashed the weights again.
            if (theirs[name] == value || (name == "weights_found" && theirs[name].empty())) continue;
            if (name == "weights_found")
                throw Error("Rank ", rank, " has other files in ", run.weights,
                            " than rank 0; copy the folder to every machine.");
            if (name == "data_found")
                throw Error("Rank ", rank, " reads other --data than rank 0; give every rank the same data.");
            throw Error("Rank ", rank, " was started with --", name, " ", theirs[name].dump(),
                        ", but rank 0 with ", value.dump(), "; give every rank the same flags.");
        }
    }
    if (!run.flags.resume.empty()) {
        const Json theirs = run.state.settings.at("data_found");
        for (const auto& [part, found] : run.data.items())
            if (theirs.at(part) != found)
                throw Error("--data is not that of the checkpoint's run (", part, ": ",
                            found.get<std::string>(), ", there ", theirs.at(part).get<std::string>(),
                            "); give the same data again.");
    }
    Json settings = run.flags.saved();
    settings["accumulate"] = run.micro_batches();  // a checkpoint knows nothing of ranks
    settings["data_found"] = run.data;
    run.state.settings = settings;
}

// As the last rank, which keeps most.
Setup most_loaded(Setup s) {
    s.rank = s.ranks - 1;
    return s;
}

// What is good to know before the first step; --plan has more.
void print_start(const Run& run, const std::string& device) {
    const Setup& s = run.setup;
    const ModelConfig& c = s.config;
    const bool gpu = run.flags.device == "gpu";
    const std::vector<MemoryRow> plan = gpu ? gpu_memory_plan(most_loaded(s)) : memory_plan(most_loaded(s));
    auto mib = [&](Category category) { return double(total_bytes(plan, category)) / (1 << 20); };
    std::printf("model: %s, %ld parameters: %ld layers, hidden size %ld, %ld heads, vocabulary %ld; %s\n",
                printable(c.name).c_str(), parameter_count(c), c.L, c.C, c.NH, c.V,
                run.weights.empty() ? "random weights" : printable("weights of " + run.weights).c_str());
    std::printf("recipe: %s, %s\n", s.recipe.name, s.recipe.about);
    std::printf("moments: %s, %s and %s; master weights: %s\n", s.optimizer.name, info(s.optimizer.m).name,
                info(s.optimizer.v).name, run.flags.master.c_str());
    std::printf("device: %s\n", device.c_str());
    if (run.corpus.train.size()) std::printf("text: %s\n", printable(run.corpus.description).c_str());
    std::printf("tokens: %ld a step, %ld x %ld in each of %ld micro-batches on %ld ranks\n",
                run.micro_batches() * run.batch_tokens(), s.B, s.T, run.micro_batches(), s.ranks);
    std::printf(
        "memory: %.1f MiB%s: weights %.1f, gradients %.1f, moments and masters %.1f, saved activations %.1f",
        mib(Category::All), gpu ? "" : " and workspace", mib(Category::Weights), mib(Category::Gradients),
        mib(Category::Optimizer), mib(Category::Activations));
    std::printf(gpu ? ", workspace %.1f\n" : "\n", mib(Category::Workspace));
    if (run.flags.resume.empty()) std::printf("checkpoints: %s\n\n", printable(run.flags.out).c_str());
    else
        std::printf("checkpoints: %s; continuing step %ld of %s\n\n", printable(run.flags.out).c_str(),
                    run.state.step, printable(run.weights).c_str());
}

// Files and flags are checked before the model is made, which can take minutes.
void make_model(Run& run, bool gpu) {
    const bool resumes = !run.flags.resume.empty();
    if (!run.weights.empty()) load_weights(run.weights, run.setup.config, nullptr);
    if (!run.weights.empty() && run.setup.rank == 0) run.companions = read_companions(run.weights);
    if (!run.flags.log.empty() && run.setup.rank == 0) {
        run.log.open(run.flags.log, std::ios::app);
        if (!run.log) throw Error("--log ", run.flags.log, " cannot be written; choose another file.");
    }
    run.model = gpu ? make_gpu(run.setup) : make_reference(run.setup);
    if (resumes) load_checkpoint(run.weights, *run.model);
    else if (!run.weights.empty()) load_weights(run.weights, run.setup.config, run.model.get());
}

// A second signal ends the program at once. Under nohup a hangup stays ignored.
void finish_step_at_signal() {
    for (int signal : {SIGINT, SIGTERM, SIGHUP}) {
        const auto before = std::signal(signal, [](int s) {
            interrupted = s;
            std::signal(s, SIG_DFL);
        });
        if (signal == SIGHUP && before == SIG_IGN) std::signal(signal, SIG_IGN);
    }
}

// `processes` belongs to main(), which after an error tells the other ranks of it.
int run_program(int argc, char** argv, std::unique_ptr<ProcessGroup>& processes) {
    Run run;
    Flags& flags = run.flags;
    std::exception_ptr wrong_flags;  // the other ranks hear of it, too
    try {
        flags.parse(argc, argv);
    } catch (const Error&) {
        wrong_flags = std::current_exception();
    }
    const Launch launch = find_launch(!wrong_flags && flags.given("ranks") ? flags.ranks : 0);
    const bool several = launch.ranks > 1 && !flags.plan && !flags.help;
    processes = ProcessGroup::start(several ? launch : Launch());
    const bool prints = launch.rank + processes->rank() == 0;  // rank 0 alone
    if (!prints && !std::freopen("/dev/null", "w", stdout)) ::close(1);
    if (wrong_flags) std::rethrow_exception(wrong_flags);
    if (flags.help) return print_help(), 0;
    run.processes = processes.get();
    run.setup.ranks = launch.ranks, run.setup.rank = processes->rank();
    run.setup.processes = several ? processes.get() : nullptr;

    const int64_t device = choose("--device", flags.device, {"auto", "cpu", "gpu"});
    const std::string why_cpu = device == 1 ? "" : why_no_gpu(processes->local());
    const bool gpu = device != 1 && (why_cpu.empty() || (flags.plan && device == 2));  // a plan needs no GPU
    if (device == 2 && !gpu) throw Error("--device gpu cannot be used: ", why_cpu, ".");
    flags.device = gpu ? "gpu" : "cpu";
    if (gpu) flags.take_gpu_defaults();
    choose_checkpoint(run);
    if (!flags.resume.empty()) take_checkpoint(run);
    make_setup(run);
    load_data(run);
    validate(run.setup);
    if (!flags.plan) require_same(run);
    print_start(run, flags.device + (why_cpu.empty() ? "" : " (" + why_cpu + ")"));
    if (flags.plan) {
        print_precision_plan(run.setup);
        print_memory_plan(most_loaded(run.setup));
        return 0;
    }
    make_model(run, gpu);
    Json line = {
        {"kind", "settings"}, {"step", run.state.step}, {"parameters", parameter_count(run.setup.config)}};
    line.update(flags.settings());
    line["ranks"] = run.setup.ranks;
    run.print_log(line);
    if (flags.steps == 0) return validate(run), print_quantization(run), 0;
    finish_step_at_signal();
    return loop_and_save(run);
}

// GNU's OpenMP spins at the end of every parallel loop unless it is told otherwise before main. On a machine
// with other work, a step then takes several times as long. So the program starts itself again with the
// setting; if that fails, it goes on.
void wait_without_spinning(char** argv) {
    if (std::getenv("OMP_WAIT_POLICY")) return;
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);
}

}  // namespace

int main(int argc, char** argv) {
    wait_without_spinning(argv);
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // each line appears at once, also in a pipe or a file
    std::signal(SIGXFSZ, SIG_IGN);  // beyond the limit on file sizes a write fails, and gets a message
    std::signal(SIGPIPE, SIG_IGN);  // the run continues when the reader of its output ends
    std::unique_ptr<ProcessGroup> processes;
    std::string sentence;
    try {
        return run_program(argc, argv, processes);
    } catch (const std::bad_alloc&) {
        sentence = "The machine's memory ran out; choose a smaller --model, --batch, --seq or --accumulate.";
    } catch (const std::exception& error) {
        sentence = error.what();
    }
    if (processes) processes->fail(sentence);
    print_error(sentence);
    return 1;
}
