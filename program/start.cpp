// program/start.cpp - the start of a run: from the flags to a model (start.h).
#include <malloc.h>
#include <omp.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <cstdio>

#include "../data/files.h"
#include "../gpu/gpu_model.h"
#include "clock.h"
#include "plan.h"
#include "resume.h"
#include "start.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// The processes of the run, and their device

// --ranks starts processes on this machine. Thousands of them, by a slip of the finger, would bring it down.
static void require_cores(int64_t ranks) {
    constexpr int64_t RANKS_PER_CORE = 4;
    const int64_t cores = omp_get_num_procs(), most = RANKS_PER_CORE * cores;
    if (ranks > most)
        throw Error("--ranks ", ranks, " is too many for a machine of ", cores, " cores; use at most ", most,
                    ", ", RANKS_PER_CORE, " for each core.");
}

// The path of the file that a descriptor of this process is open on. If that is no file, the path names none.
static std::string path_of_descriptor(int descriptor) {
    std::error_code none;
    return fs::read_symlink(concat("/proc/self/fd/", descriptor), none).string();
}

std::vector<std::string> files_of_output() {
    return {path_of_descriptor(STDOUT_FILENO), path_of_descriptor(STDERR_FILENO)};
}

std::unique_ptr<ProcessGroup> start_ranks(const Launch& launch, const Flags& flags) {
    const bool several = launch.ranks > 1 && !flags.plan;
    if (several && launch.address.empty()) require_cores(launch.ranks);
    std::unique_ptr<ProcessGroup> processes = ProcessGroup::start(several ? launch : Launch());
    const bool prints = launch.rank == 0 && processes->rank() == 0;  // by torchrun, and by --ranks
    if (!prints && !std::freopen("/dev/null", "w", stdout))
        throw Error("/dev/null cannot be opened for writing; make it writable for everyone.");
    return processes;
}

// A plan for a GPU needs none.
std::string choose_device(const ProcessGroup& processes, Flags& flags) {
    const std::string why = flags.device == "cpu" ? "" : select_gpu(processes.local_rank());
    if (flags.device == "gpu" && !why.empty() && !flags.plan)
        throw Error("--device gpu cannot be used: ", why, ".");
    if (flags.device == "auto") flags.device = why.empty() ? "gpu" : "cpu";
    return why;
}

void never_return_memory_to_system() {
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 2147483647);
}

// -----------------------------------------------------------------------------------------------------------
// The model and the formats

// The row of known_models() that --model names, if it names no folder.
static const ModelConfig& find_model(const std::string& name) {
    if (const ModelConfig* config = find_row_or_null(known_models(), name)) return *config;
    throw Error("--model ", name, " is no folder on this machine, and no model that ./train --help lists; ",
                "correct it, or download a model (hf download NAME --local-dir FOLDER) and give its folder.");
}

static std::string find_weights(const Resumed& resumed, const Flags& flags) {
    if (flags.resumes()) return resumed.checkpoint;
    if (!fs::is_directory(flags.model)) return "";
    if (find_row_or_null(known_models(), flags.model))
        throw Error("--model ", flags.model, " is also a folder; write ./", flags.model, " for the folder.");
    return model_in(flags.model);
}

ModelAndFormats choose_model_and_formats(const RunLocation& location, const Resumed& resumed, Flags& flags) {
    Recipe recipe = find_row(recipes(), flags.recipe, "--recipe");
    if (flags.optimizer.empty()) flags.optimizer = recipe.default_optimizer;
    if (flags.attention == "groups") recipe.saved_attention = E4M3_PER_1x16;
    if (flags.on_gpu() && location.why_no_gpu.empty()) recipe = recipe_on_gpu(recipe, gpu_capability());
    const OptimizerFormats optimizer = find_row(optimizers(), flags.optimizer, "--optimizer");
    if (flags.gradients == "none" && flags.clip > 0 && location.ranks == 1)
        throw Error("--gradients none updates before the norm of all gradients is known; give --clip 0.");
    const std::string folder = find_weights(resumed, flags);
    return {
        .weights_folder = folder,
        .config = folder.empty() ? find_model(flags.model) : read_model_config(folder),
        .recipe = recipe,
        .optimizer = optimizer,
    };
}

// -----------------------------------------------------------------------------------------------------------
// The data

// The files of the data as a checkpoint lists them, a line for each, so that a message can name the one that
// was changed. If there are very many, the list is empty: each checkpoint would have it.
static std::vector<std::string> data_lines(const Corpus& corpus) {
    constexpr size_t MOST_FILES = 10'000;
    std::vector<std::string> lines;
    if (corpus.files.size() <= MOST_FILES)
        for (const DataFile& file : corpus.files) lines.push_back(file.line());
    return lines;
}

// The files of data that the saved flags of a run list.
static std::vector<DataFile> data_files(const ordered_json& saved) {
    std::vector<DataFile> files;
    for (const ordered_json& line : saved.at("data_files")) files.push_back(DataFile::from_line(line));
    return files;
}

// Which files of --data are no data: what the ranks of this run write, and files that were not there when the
// run began.
static CorpusOptions corpus_options_on_all_ranks(const RunLocation& location, const Flags& flags,
                                                 const Resumed& resumed) {
    CorpusOptions options{.val = flags.val};
    std::vector<std::string> output_paths = location.output_files;
    output_paths.push_back(flags.log);
    output_paths.push_back(flags.out);
    for (const std::string& path : output_paths)
        for (const std::string& theirs : location.processes.all_gather(path))
            options.output_paths.push_back(theirs);
    const ordered_json& before = resumed.flags_of_checkpoint;
    if (flags.resumes() && flags.data == before.at("data").get<std::string>() &&
        flags.val == before.at("val").get<std::string>())
        options.files_of_resumed_run = data_files(resumed.flags_of_checkpoint);
    return options;
}

Corpus load_data_on_all_ranks(const RunLocation& location, const Flags& flags, const Resumed& resumed) {
    if (flags.plan && !flags.given("data")) return {};
    return load_corpus(flags.data, corpus_options_on_all_ranks(location, flags, resumed));
}

int64_t choose_sequence_length(const Flags& flags, const ModelConfig& config, const Corpus& data) {
    const int64_t packed = data.seq;  // 0: the data are not packed
    int64_t seq = flags.seq;
    if (!flags.given("seq") && !flags.resumes())
        seq = packed ? packed : std::min(seq, config.longest_sequence());
    if (packed && packed != seq)
        throw Error("--data was packed for --seq ", packed, ", not ", seq, "; give --seq ", packed,
                    ", or make it again with data/tokenize.py.");
    return seq;
}

// The bytes of a text are the tokens of a model only if the model has no tokenizer of any kind.
static void require_no_tokenizer(const std::string& model, const std::string& data) {
    const std::string sentence = concat("--data contains bytes of text, which are no tokens of ", model);
    const std::string tokenizer = tokenizer_in(model);
    if (!tokenizer.empty())
        throw Error(sentence, ": it has a tokenizer (", tokenizer, "); python3 data/tokenize.py --tokenizer ",
                    model, " --out tokens ", data, " makes token files, which --data tokens reads.");
    if (fs::exists(path_in(model, "tokenizer.bin")))
        throw Error(sentence,
                    ": it was trained on token files, whose tokenizer.bin it has; make token files of ",
                    "the text with the same tokenizer (data/tokenize.py).");
}

// Token files have no meaning for a model with another tokenizer.
static void require_tokenizer_of(const std::string& model, const Corpus& data) {
    const std::string& vocabulary = data.vocabulary_file;
    const std::string folder = vocabulary.empty() ? data.tokenizer_folder : folder_of(vocabulary);
    if (!folder.empty() && tokenizers_differ(model, folder))
        throw Error("--data has tokens of another tokenizer than that of ", model,
                    "; make token files with that one (python3 data/tokenize.py --tokenizer ", model, ").");
}

// The model with the vocabulary of the data, or of bytes, if it has none of its own.
static ModelConfig with_vocabulary(ModelConfig config, const Corpus& data) {
    const int64_t largest = std::max(data.train_summary.largest, data.validation_summary.largest);
    const int64_t in_use = largest + 1;  // 0: there are no data
    if (config.V == 0) config.V = in_use ? std::max(in_use, data.vocabulary.size()) : 256;
    if (in_use > config.V)
        throw Error("--data contains token ", largest, ", but ", config.name, " has ", config.V,
                    " tokens; make token files with its tokenizer (data/tokenize.py).");
    return config;
}

RunSettings make_settings(const RunLocation& location, const Flags& flags, const ModelAndFormats& chosen,
                          const Corpus& data) {
    const std::string& folder = chosen.weights_folder;
    if (data.tokens_are_bytes && !folder.empty()) require_no_tokenizer(folder, flags.data);
    if (!data.tokens_are_bytes && !folder.empty() && !flags.resumes()) require_tokenizer_of(folder, data);
    const RunSettings settings{
        .config = with_vocabulary(chosen.config, data),
        .recipe = chosen.recipe,
        .optimizer = chosen.optimizer,
        .B = flags.batch,
        .T = flags.seq,
        .micro_batches_per_rank = flags.accumulate,
        .seed = uint64_t(flags.seed),
        .keep_masters = flags.master == "exact",
        .keep_gradients = flags.gradients == "kept",
        .rank = location.processes.rank(),
        .ranks = location.ranks,
        .communicator = location.processes.count() > 1 ? &location.processes : nullptr,
    };
    require_supported(settings);
    return settings;
}

double choose_learning_rate(const Flags& flags, const ModelAndFormats& chosen, const RunSettings& settings) {
    if (flags.given("lr") || flags.resumes()) return flags.lr;
    if (!chosen.weights_folder.empty()) return FINE_TUNING_RATE;
    return default_learning_rate(parameter_count(settings.config));
}

int64_t choose_warmup(const Flags& flags) {
    const bool is_known = flags.given("warmup") || flags.resumes();
    return is_known ? flags.warmup : default_warmup(flags.steps);
}

// -----------------------------------------------------------------------------------------------------------
// The flags that checkpoints keep, and what belongs to them

ordered_json flags_to_save_on_all_ranks(const Run& run) {
    const auto found = [](const TokenStream& tokens, const TokenStream::Summary& summary) {
        return concat(tokens.size(), " tokens, hash ", summary.hash);
    };
    ordered_json saved = run.flags.saved_as_json();
    saved["data_found"] = {{"train", found(run.corpus.train, run.corpus.train_summary)},
                           {"held out", found(run.corpus.validation, run.corpus.validation_summary)}};
    saved["data_files"] = data_lines(run.corpus);
    saved["accumulate"] = micro_batches_of_step(run.settings);  // a checkpoint knows nothing of ranks
    saved["changes"] = run.resumed.changes;
    const std::string now_on_rank_0 = run.processes.all_gather(utc_now()).front();
    saved["run_started"] = run.resumed.flags_of_checkpoint.value("run_started", now_on_rank_0);
    return saved;
}

// What differs between the data of two runs, or of two ranks, by their saved flags; empty if the tokens are
// the same. The hashes show whether they are, and the lists of files show in which file they are not.
static std::string difference_of_data(const ordered_json& there, const ordered_json& here) {
    const nlohmann::json found_there = there.at("data_found"), found_here = here.at("data_found");
    if (found_there == found_here) return "";
    const std::string text = difference(data_files(there), data_files(here));
    return text.empty() ? "its tokens are not the same" : text;
}

// Hashes of the files of a model folder. The first rank of each machine makes them, if there are several
// machines: another one may have other files under the same name.
static ordered_json hashes_of_weights_on_all_ranks(const Run& run) {
    const std::vector<int> local = run.processes.all_gather(run.processes.local_rank());
    const bool several_machines = std::count(local.begin(), local.end(), 0) > 1;
    ordered_json hashes;
    if (!several_machines || run.processes.local_rank() != 0 || run.weights_folder.empty()) return hashes;
    for (const auto& file : fs::directory_iterator(run.weights_folder))
        if (file.is_regular_file()) hashes[file.path().filename()] = hash_file(file.path());
    return hashes;
}

// Every rank compares all others with rank 0.
void require_same_on_all_ranks(const Run& run) {
    ordered_json mine = run.flags_to_save;
    mine["accumulate"] = run.flags.accumulate;
    mine["resume"] = run.weights_folder;
    mine["device"] = run.flags.device;
    mine["weights_found"] = hashes_of_weights_on_all_ranks(run);
    // A path may have bytes that are not UTF-8.
    const std::vector<std::string> all =
        run.processes.all_gather(mine.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
    const ordered_json first = ordered_json::parse(all[0]);
    for (size_t rank = 1; rank < all.size(); rank++) {
        const ordered_json other = ordered_json::parse(all[rank]);
        const std::string of_data = difference_of_data(first, other);
        if (!of_data.empty())
            throw Error("Rank ", rank, " has other --data than rank 0: ", of_data,
                        "; give all ranks the same.");
        for (const auto& [name, value] : first.items()) {
            const ordered_json theirs = other.value(name, ordered_json());
            if (name != "data_files" && !theirs.is_null() && theirs != value)
                throw Error("Rank ", rank, " differs from rank 0 in ", name, " (", theirs.dump(), ", there ",
                            value.dump(), "); give the same flags, data and model.");
        }
    }
}

// With other data the saved state, which has the place in the data, would mean something else.
void require_data_of_resumed(const Run& run) {
    const ordered_json& before = run.resumed.flags_of_checkpoint;
    const ordered_json& now = run.flags_to_save;
    const std::string text = difference_of_data(before, now);
    if (text.empty()) return;
    const std::string new_run =
        concat(", or begin a new run from its weights: --model ", run.weights_folder, ".");
    for (const char* name : {"data", "val"})
        if (before.at(name) != now.at(name))
            throw Error("--", name, " ", now.at(name).dump(),
                        " is not the data of the checkpoint's run, which ", "had --", name, " ",
                        before.at(name).dump(), "; leave it out", new_run);
    const bool has_val = !run.flags.val.empty();
    throw Error(has_val ? "--data or --val" : "--data", " was changed since the checkpoint's run: ", text,
                "; restore it", new_run);
}

// A run that needs more memory than the machine has would end after minutes, and other programs with it.
void require_memory_for_cpu(const RunSettings& s) {
    struct sysinfo machine;
    if (::sysinfo(&machine) != 0) return;
    const int64_t present = int64_t(machine.totalram + machine.totalswap) * machine.mem_unit;
    const int64_t needed = total_bytes(memory_plan(s)) + cpu_copies_bytes(s);
    if (needed > present)
        throw Error("The run needs at least ", gigabytes(needed), " GB of memory, and this machine has ",
                    gigabytes(present), " GB; choose a smaller --model, --batch or --seq.");
}

// -----------------------------------------------------------------------------------------------------------
// The model

FileContents find_other_files(const std::string& weights_folder, const Corpus& corpus) {
    FileContents files;
    if (!weights_folder.empty()) files = read_other_files(weights_folder);
    const std::string& pieces = corpus.vocabulary_file;
    const bool has_tokenizer = !weights_folder.empty() && !tokenizer_in(weights_folder).empty();
    if (!pieces.empty() && !has_tokenizer) files["tokenizer.bin"] = MappedFile(pieces).text();
    add_tokenizer(corpus.tokenizer_folder, files);
    return files;
}

void make_loaders(Run& run) {
    const RunSettings& s = run.settings;
    run.validation_loader.emplace(run.corpus.validation, 1, s.T, 0,
                                  "held out (" + run.corpus.held_out_rule + ")");
    const char* const purpose =
        run.flags.val.empty() ? "to train on" : "to train on (without those of --val)";
    if (run.flags.steps > 0) run.training_loader.emplace(run.corpus.train, s.B, s.T, s.seed, purpose);
}

std::unique_ptr<Model> make_model(const Run& run) {
    std::unique_ptr<Model> model =
        run.flags.on_gpu() ? make_gpu_model(run.settings) : make_reference_model(run.settings);
    if (run.flags.resumes()) load_checkpoint(run.weights_folder, *model);
    else if (!run.weights_folder.empty()) load_weights(run.weights_folder, *model);
    return model;
}

void log_flags(Run& run) {
    ordered_json fields = {{"date", utc_now()}, {"run_started", run.flags_to_save["run_started"]}};
    fields.update(run.flags.all_as_json());
    fields["parameters"] = parameter_count(run.settings.config);
    fields["ranks"] = run.settings.ranks;
    run.write_to_log("settings", fields);
}

}  // namespace coat
